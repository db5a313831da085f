"""The four ways a vector travels (EmbeddingDtype in the wire contract) and their numpy side."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from encoder.v1 import encoder_pb2 as pb

Dtype = Literal["float32", "float16", "int8", "binary"]


@dataclass(frozen=True)
class VectorFormat:
    """One packing. item: numpy type of a stored element; per_byte: dimensions in one byte (binary), else 0."""

    name: str
    wire: pb.EmbeddingDtype
    item: np.dtype[Any]
    per_byte: int = 0

    def width(self, dimensions: int) -> int:
        """Elements of a row that holds `dimensions` components."""
        return -(-dimensions // self.per_byte) if self.per_byte else dimensions

    def fault(self, embedding: pb.Embedding) -> str:
        """What is wrong with a received embedding; empty when nothing is."""
        if embedding.dtype != self.wire:
            return f"asked for {self.name}, answered with dtype {embedding.dtype}"
        expected = self.width(embedding.dimensions) * self.item.itemsize
        if not embedding.dimensions or len(embedding.values) != expected:
            return f"{len(embedding.values)} bytes for {embedding.dimensions} dimensions of {self.name}"
        return ""

    def rows(self, packed: list[bytes], dimensions: int) -> npt.NDArray[Any]:
        """Writable array [len(packed), width] over the bytes, joined once."""
        # A bytearray, because a view on bytes would be read-only.
        joined = bytearray().join(packed)
        return np.frombuffer(joined, dtype=self.item).reshape(len(packed), self.width(dimensions))

    def blank(self, count: int, dimensions: int) -> npt.NDArray[Any]:
        """Array [count, width] of what stands for a missing vector: NaN, or 0 where there is no NaN."""
        filler = np.nan if self.item.kind == "f" else 0
        return np.full((count, self.width(dimensions)), filler, dtype=self.item)


FORMATS: Mapping[str, VectorFormat] = MappingProxyType(
    {
        form.name: form
        for form in (
            VectorFormat("float32", pb.EMBEDDING_DTYPE_FLOAT32, np.dtype("<f4")),
            VectorFormat("float16", pb.EMBEDDING_DTYPE_FLOAT16, np.dtype("<f2")),
            VectorFormat("int8", pb.EMBEDDING_DTYPE_INT8, np.dtype(np.int8)),
            VectorFormat("binary", pb.EMBEDDING_DTYPE_BINARY, np.dtype(np.uint8), per_byte=8),
        )
    }
)
