"""`python -m deployments.router.describe`: all settings as a Markdown table, for docs/router.md."""

import json
import sys
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from deployments.router.settings import RouterSettings
from deployments.router.tokens.entries import TokenEntry

HEAD = "| setting | default | what it is |\n| --- | --- | --- |"


def settings_table() -> str:
    """Every setting with its dotted name; `[]` stands for each element of a list."""
    return _table(RouterSettings)


def entries_table() -> str:
    """Every key of an entry of the tokens file."""
    return _table(TokenEntry)


def _table(model: type[BaseModel]) -> str:
    rows = [f"| `{name}` | {default} | {told} |" for name, default, told in _rows(model, "")]
    return "\n".join([HEAD, *rows])


def _rows(model: type[BaseModel], prefix: str) -> Iterator[tuple[str, str, str]]:
    for name, field in model.model_fields.items():
        section = _section(field.annotation)
        told = (field.description or "").replace("|", "\\|")
        if section is None:
            yield prefix + name, _default(field), told
            continue
        several = "[]" if isinstance(field.default, tuple) else ""
        if several or field.default is None:
            yield prefix + name, _default(field), told
        yield from _rows(section, f"{prefix}{name}{several}.")


def _section(annotation: Any) -> type[BaseModel] | None:
    """The settings model in a field's type: alone, optional, or in a tuple."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next((found for found in map(_section, get_args(annotation)) if found is not None), None)


def _default(field: FieldInfo) -> str:
    if field.is_required():
        return "required"
    if field.default is None or field.default in ("", ()):
        return "empty"
    return f"`{json.dumps(field.default)}`"


if __name__ == "__main__":
    print(settings_table())
    print()
    print(entries_table())
    sys.exit(0)
