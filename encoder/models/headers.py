"""What safetensors files say of themselves, read from their headers alone: names, dtypes, shapes, and whether all of
the data is there.

Format: 8 bytes little-endian length of a JSON header, the header, then the data that its offsets point into
(safetensors' README, "Format").
"""

import json
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from encoder.errors import CheckpointError

INDEX = "model.safetensors.index.json"
# What safetensors itself takes.
MAX_HEADER_BYTES = 100_000_000


@dataclass(frozen=True)
class TensorHeader:
    """One tensor: its dtype in safetensors' spelling (F32, BF16, …) and its shape."""

    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightHeaders:
    """All tensors of a folder's safetensors files, by name."""

    files: int
    size: int
    tensors: Mapping[str, TensorHeader]

    @property
    def parameters(self) -> int:
        return sum(prod(tensor.shape) for tensor in self.tensors.values())

    def dtypes(self) -> dict[str, int]:
        """Tensors of each dtype, the most frequent first."""
        return dict(Counter(tensor.dtype for tensor in self.tensors.values()).most_common())


def read_headers(folder: Path) -> WeightHeaders:
    """Raises CheckpointError for a file that is no safetensors, or not whole, and for a shard that is not there."""
    paths = sorted(folder.glob("*.safetensors"))
    index = folder / INDEX
    if index.exists():
        _check_shards(index, {path.name for path in paths})
    tensors: dict[str, TensorHeader] = {}
    for path in paths:
        tensors |= _read(path)
    return WeightHeaders(len(paths), sum(path.stat().st_size for path in paths), tensors)


def _check_shards(index: Path, there: set[str]) -> None:
    try:
        named = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values())
    except (OSError, ValueError, KeyError, AttributeError, TypeError) as error:
        raise CheckpointError(f"{index.name} cannot be read ({type(error).__name__}): download it again") from None
    missing = sorted(named - there)
    if missing:
        raise CheckpointError(f"{len(missing)} of {len(named)} shards are missing, {missing[0]} first: download them")


def _read(path: Path) -> dict[str, TensorHeader]:
    size = path.stat().st_size
    with path.open("rb") as file:
        start = file.read(8)
        length = int.from_bytes(start, "little")
        if len(start) < 8 or not 2 <= length <= MAX_HEADER_BYTES:
            raise CheckpointError(f"{path.name} is no safetensors file{_hint(start)}: download it again")
        if 8 + length > size:
            raise CheckpointError(f"{path.name} ends within its header, at byte {size}: download it again")
        try:
            header = json.loads(file.read(length))
            entries = {name: value for name, value in header.items() if name != "__metadata__"}
            tensors = {name: TensorHeader(value["dtype"], tuple(value["shape"])) for name, value in entries.items()}
            end = max((int(value["data_offsets"][1]) for value in entries.values()), default=0)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError):
            raise CheckpointError(f"{path.name} has a header that cannot be read: download it again") from None
    expected = 8 + length + end
    if size != expected:
        what = "truncated" if size < expected else "longer than its header says"
        raise CheckpointError(f"{path.name} is {what}: {size} bytes of {expected}; download it again")
    return tensors


def _hint(start: bytes) -> str:
    return " but a Git LFS pointer" if start.startswith(b"version ") else ""


def missing_tensors(headers: WeightHeaders, expected: Mapping[str, Any]) -> list[str]:
    """Names of `expected` (name to a tensor or anything else with a shape) that are not there, or in another shape.

    A name is there too with something more before it, or less: classes of transformers hold their parts under other
    prefixes than a whole model does.
    """
    by_tail: dict[str, list[TensorHeader]] = {}
    for name, tensor in headers.tensors.items():
        for tail in _tails(name):
            by_tail.setdefault(tail, []).append(tensor)
    missing = []
    for name, tensor in expected.items():
        found = by_tail.get(name, []) + [headers.tensors[tail] for tail in _tails(name) if tail in headers.tensors]
        if not any(one.shape == tuple(tensor.shape) for one in found):
            missing.append(name)
    return missing


def _tails(name: str) -> list[str]:
    parts = name.split(".")
    return [".".join(parts[start:]) for start in range(len(parts))]
