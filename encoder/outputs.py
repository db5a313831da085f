"""From pooled, projected vectors to what the caller asked for: truncate → normalise → quantise → pack.

Truncating comes before normalising because Matryoshka models are trained so. The packing is the wire contract's
(`proto/encoder/v1/encoder.proto`, `EmbeddingDtype`).
"""

from dataclasses import dataclass
from typing import Literal

import numpy as np

from encoder.errors import EncoderError, InvalidInput

OutputDtype = Literal["float32", "float16", "int8", "binary"]
OutputKind = Literal["pooled", "tokens"]
OUTPUT_DTYPES: tuple[OutputDtype, ...] = ("float32", "float16", "int8", "binary")
INT8_LEVELS = 127


@dataclass(frozen=True)
class OutputOptions:
    """What the caller asks of a vector, `dimensions` 0 keeps all; or of the patch features, `kind` 'tokens'."""

    dtype: OutputDtype = "float32"
    dimensions: int = 0
    normalize: bool = True
    kind: OutputKind = "pooled"


@dataclass(frozen=True)
class FinishedVector:
    """A packed vector: `values` little-endian as `dtype` says, `dimensions` components, `scale` for int8 else 0."""

    values: bytes
    dtype: OutputDtype
    dimensions: int
    scale: float = 0.0


class NonFiniteVector(EncoderError):
    """The forward gave NaN or infinity for this item; it is never sent."""


def check_options(options: OutputOptions, full_dimensions: int) -> None:
    """Raises InvalidInput when `options` cannot hold for vectors of `full_dimensions` components."""
    if options.dtype not in OUTPUT_DTYPES:
        raise InvalidInput(f"output dtype {options.dtype!r} is unknown: use one of {', '.join(OUTPUT_DTYPES)}")
    if not 0 <= options.dimensions <= full_dimensions:
        raise InvalidInput(
            f"dimensions={options.dimensions} is outside 1..{full_dimensions} of this model: "
            "ask for fewer, or 0 for all"
        )


def finish(vectors: np.ndarray, options: OutputOptions) -> list[FinishedVector | EncoderError]:
    """Finishes float32 vectors [n, D]; each row gives a packed vector or its own error.

    Raises InvalidInput when the options cannot hold for D at all.
    """
    check_options(options, vectors.shape[1])
    kept = vectors.astype(np.float32, copy=False)
    if options.dimensions:
        kept = kept[:, : options.dimensions]
    finite = np.asarray(np.isfinite(kept).all(axis=1))
    if options.normalize:
        kept = normalize_rows(np.where(finite[:, None], kept, 0))
    return [
        _pack(row, options.dtype)
        if good
        else NonFiniteVector("the forward gave a vector with NaN or infinity: see the backend report")
        for row, good in zip(kept, finite, strict=True)
    ]


def normalize_rows(vectors: np.ndarray) -> np.ndarray:
    """Rows of float32 [n, D] scaled to length 1; a zero row stays zero. The length is taken in float64."""
    lengths = np.sqrt(np.square(vectors, dtype=np.float64).sum(axis=1, keepdims=True))
    lengths[lengths == 0] = 1.0
    return (vectors / lengths).astype(np.float32)


def quantize_int8(vector: np.ndarray) -> tuple[np.ndarray, float]:
    """int8 [D] and its scale: scale = max|v| / 127 in float32, q = round_half_even(v / scale)."""
    scale = np.float32(np.abs(vector).max(initial=0.0)) / np.float32(INT8_LEVELS)
    if scale == 0:
        return np.zeros(vector.shape, np.int8), 0.0
    levels = np.rint(vector / scale).clip(-INT8_LEVELS, INT8_LEVELS)
    return levels.astype(np.int8), float(scale)


def _pack(vector: np.ndarray, dtype: OutputDtype) -> FinishedVector | EncoderError:
    size = vector.shape[0]
    if dtype == "float32":
        return FinishedVector(vector.astype("<f4", copy=False).tobytes(), dtype, size)
    if dtype == "float16":
        with np.errstate(over="ignore"):
            half = vector.astype("<f2")
        if not np.isfinite(half).all():
            return InvalidInput("a component is beyond the range of float16: ask for float32, or normalise")
        return FinishedVector(half.tobytes(), dtype, size)
    if dtype == "int8":
        levels, scale = quantize_int8(vector)
        return FinishedVector(levels.tobytes(), dtype, size, scale)
    return FinishedVector(np.packbits(vector > 0, bitorder="big").tobytes(), dtype, size)
