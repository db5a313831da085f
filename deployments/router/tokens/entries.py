"""The file of tokens: a YAML or JSON list of entries. It holds no token, only what a token's SHA-256 may do."""

import hashlib
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, TypeAdapter, ValidationError

from deployments.router.sections import Section
from encoder.errors import InvalidInput
from encoder.settings import describe_validation


class TokenEntry(Section):
    """What the owner of one token may do, in each router process."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._@-]{0,63}$", description="of its owner: for logs and metrics")
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$", description="SHA-256 of the token, hexadecimal")
    requests_per_second: float = Field(gt=0, description="calls and stream items, on average")
    burst: float = Field(ge=1, description="calls at once, after a pause")
    max_in_flight: int = Field(ge=1, description="calls and stream items at once; streams are counted apart")
    max_items_per_second: float | None = Field(
        default=None, gt=0, description="images and texts, on average; empty: any number"
    )


_ENTRIES = TypeAdapter(tuple[TokenEntry, ...])


def digest_of(token: str) -> str:
    """SHA-256 as in an entry."""
    return hashlib.sha256(token.encode()).hexdigest()


def load_entries(path: Path) -> tuple[TokenEntry, ...]:
    """Raises InvalidInput with one line that quotes nothing of the file but keys and names."""
    try:
        values = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise InvalidInput(f"tokens file {path} cannot be read: {error.strerror}") from None
    except (UnicodeDecodeError, yaml.YAMLError) as error:
        mark = getattr(error, "problem_mark", None)
        where = f" (line {mark.line + 1})" if mark is not None else ""
        raise InvalidInput(f"tokens file {path} is neither YAML nor JSON{where}") from None
    if not isinstance(values, list):
        raise InvalidInput(f"tokens file {path} must be a list of entries; [] lets nobody in")
    return _entries(values, path)


def _entries(values: list[Any], path: Path) -> tuple[TokenEntry, ...]:
    try:
        entries = _ENTRIES.validate_python(values)
    except ValidationError as error:
        raise InvalidInput(f"tokens file {path}: {describe_validation(error)}") from None
    for key in ("name", "sha256"):
        found = [getattr(entry, key) for entry in entries]
        twice = sorted({entry.name for entry in entries if found.count(getattr(entry, key)) > 1})
        if twice:
            raise InvalidInput(f"tokens file {path}: entries must differ in {key}, these do not: {', '.join(twice)}")
    return entries
