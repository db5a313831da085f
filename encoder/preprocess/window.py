"""A part of a resized picture without making the rest: for narrow pictures, which resizing blows up.

A 1x2000 picture resized to 224 on its shorter side has 448000 columns, of which a crop keeps 224: the whole takes
seconds and hundreds of megabytes. This computes the columns that are kept, with the arithmetic of the library that
would have made all of them (separable antialiased filters in fixed point), bit for bit.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from encoder.preprocess.geometry import Span


def _linear(distance: np.ndarray) -> np.ndarray:
    return np.maximum(0.0, 1.0 - distance)


def _cubic(distance: np.ndarray) -> np.ndarray:
    a = -0.5
    near = ((a + 2.0) * distance - (a + 3.0)) * distance * distance + 1.0
    far = (((distance - 5.0) * distance + 8.0) * distance - 4.0) * a
    return np.where(distance < 1.0, near, np.where(distance < 2.0, far, 0.0))


def _lanczos(distance: np.ndarray) -> np.ndarray:
    return np.where(distance < 3.0, np.sinc(distance) * np.sinc(distance / 3.0), 0.0)


@dataclass(frozen=True)
class Filter:
    """A resampling filter: its weight at a distance, and the distance from which it is 0."""

    weight: Callable[[np.ndarray], np.ndarray]
    support: float


FILTERS = {"bilinear": Filter(_linear, 1.0), "bicubic": Filter(_cubic, 2.0), "lanczos": Filter(_lanczos, 3.0)}
# Pillow's ImagingResample keeps 22 bits of a weight. torch's uint8 kernel keeps as many as fit 16 bits for the largest
# weight of the axis; when enlarging that one is at a border and in [1, 2), which leaves 14.
PILLOW_BITS = 22
TORCH_BITS = 14


def resample_span(pixels: np.ndarray, axis: int, size: int, span: Span, kernel: str, bits: int) -> np.ndarray:
    """`span` of an axis that is enlarged to `size`; uint8 in and out, the other axes stay as they are.

    Only for enlarging (`size` above the axis' length): see TORCH_BITS.
    """
    length = pixels.shape[axis]
    if size <= length:
        raise ValueError(f"resample_span enlarges: {length} to {size} is none of its business")
    filter_ = FILTERS[kernel]
    scale = length / size
    centers = (np.arange(span.start, span.start + span.length) + 0.5) * scale
    first = np.maximum((centers - filter_.support + 0.5).astype(np.int64), 0)
    last = np.minimum((centers + filter_.support + 0.5).astype(np.int64), length)
    taps = first[:, None] + np.arange(2 * math.ceil(filter_.support) + 1)
    weights = np.where(taps < last[:, None], filter_.weight(np.abs(taps - centers[:, None] + 0.5)), 0.0)
    weights /= np.cumsum(weights, axis=1)[:, -1:]  # summed in the order of the taps, as the libraries do
    fixed = np.trunc(weights * (1 << bits) + np.copysign(0.5, weights)).astype(np.int64)
    source = np.moveaxis(pixels, axis, 0)[np.minimum(taps, length - 1)].astype(np.int64)
    summed = np.einsum("ot,ot...->o...", fixed, source) + (1 << (bits - 1))
    return np.moveaxis(np.clip(summed >> bits, 0, 255).astype(np.uint8), 0, axis)
