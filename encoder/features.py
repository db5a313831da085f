"""Patch features on their way out: raw numbers of an image's patches, packed little-endian (`Features` on the wire)."""

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from encoder.errors import EncoderError, InvalidInput
from encoder.outputs import NonFiniteVector, OutputDtype, OutputOptions

ITEM_BYTES: dict[OutputDtype, int] = {"float32": 4, "float16": 2}


@dataclass(frozen=True)
class FinishedFeatures:
    """Packed features: `tokens` patches of `dimensions` numbers each, little-endian as `dtype` says.

    `grid`: rows and columns, with frames or tiles before them where there are some; its product is `tokens`.
    """

    values: bytes
    dtype: OutputDtype
    tokens: int
    dimensions: int
    grid: tuple[int, ...]


def check_feature_options(options: OutputOptions) -> None:
    """Raises InvalidInput for what features cannot be: quantised, truncated or normalised."""
    if options.dtype not in ITEM_BYTES:
        raise InvalidInput(
            f"patch features are not quantised: dtype {options.dtype!r} is for vectors, ask for float32 or float16"
        )
    if options.dimensions:
        raise InvalidInput(
            f"patch features are not truncated: leave dimensions={options.dimensions} out, or ask for the vector"
        )
    if options.normalize:
        raise InvalidInput("patch features are raw: leave normalize out, or ask for the vector")


def feature_bytes(grid: Sequence[int], dimensions: int, dtype: OutputDtype) -> int:
    """Bytes of the packed features of one image."""
    return prod(grid) * dimensions * ITEM_BYTES[dtype]


def finish_features(features: np.ndarray, grid: tuple[int, ...], dtype: OutputDtype) -> FinishedFeatures | EncoderError:
    """Packs features float32 [t, F] of one image, or gives its error: NaN and infinity are never sent."""
    tokens, dimensions = features.shape
    if tokens != prod(grid):
        return EncoderError(f"the forward gave {tokens} features for a grid of {'x'.join(map(str, grid))}")
    if not np.isfinite(features).all():
        return NonFiniteVector("the forward gave features with NaN or infinity: see the backend report")
    if dtype == "float32":
        packed = features.astype("<f4", copy=False)
    else:
        with np.errstate(over="ignore"):
            packed = features.astype("<f2")
        if not np.isfinite(packed).all():
            return InvalidInput("a feature is beyond the range of float16: ask for float32")
    return FinishedFeatures(packed.tobytes(), dtype, tokens, dimensions, grid)
