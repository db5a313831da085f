"""Patch features as they come back: numbers of every patch of one image, and the shape of their grid."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from encoder.client.formats import VectorFormat
from encoder.v1 import encoder_pb2 as pb

NAMES = ("float32", "float16")


@dataclass(frozen=True, eq=False)
class Features:
    """The features of one image's patches, raw: neither projected nor normalised.

    values: float32 or float16 [t, F], read-only: a view on the answer (`.copy()` makes one that can be written to).
    grid: rows and columns of the patches, with frames or tiles before them where there are some; its product is t.
    """

    values: npt.NDArray[Any]
    grid: tuple[int, ...]

    def as_grid(self) -> npt.NDArray[Any]:
        """The same numbers as [*grid, F]."""
        return self.values.reshape(*self.grid, self.values.shape[1])


def features_fault(message: pb.Features, form: VectorFormat) -> str:
    """What is wrong with received features; empty when nothing is."""
    if message.dtype != form.wire:
        return f"asked for {form.name}, answered with dtype {message.dtype}"
    expected = message.tokens * message.dimensions * form.item.itemsize
    if not expected or len(message.values) != expected:
        return f"{len(message.values)} bytes for {message.tokens} features of {message.dimensions} {form.name}"
    if prod(message.grid) != message.tokens:
        return f"a grid of {'x'.join(map(str, message.grid))} for {message.tokens} features"
    return ""


def read_features(message: pb.Features, form: VectorFormat) -> Features:
    """The features of a message that has no fault."""
    values = np.frombuffer(message.values, dtype=form.item).reshape(message.tokens, message.dimensions)
    return Features(values, tuple(message.grid))
