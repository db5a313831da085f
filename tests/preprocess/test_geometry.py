"""Sizes and spans against transformers' own functions; no pixels are made here."""

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from transformers.image_transforms import center_crop, get_resize_output_image_size, get_size_with_aspect_ratio
from transformers.image_utils import ChannelDimension, get_image_size_for_max_height_width

from encoder.preprocess.geometry import Resize, center_span

SIDES = st.integers(1, 5000)


def _array(height: int, width: int) -> np.ndarray:
    """Of this size, without the memory."""
    return np.broadcast_to(np.uint8(0), (3, height, width))


@settings(deadline=None)
@given(height=SIDES, width=SIDES, size=st.integers(1, 600))
@example(height=1666, width=2023, size=336)
@example(height=2023, width=1666, size=336)
def test_shortest(height: int, width: int, size: int) -> None:
    expected = get_resize_output_image_size(
        _array(height, width), size, default_to_square=False, input_data_format=ChannelDimension.FIRST
    )
    assert Resize("shortest", size, size).target(height, width) == expected


def test_the_order_of_multiplying_and_dividing_matters() -> None:
    """int((long / short) * size) gives 407 here."""
    assert Resize("shortest", 336, 336).target(1666, 2023) == (336, 408)


@settings(deadline=None)
@given(height=SIDES, width=SIDES, size=st.integers(10, 600), more=st.integers(0, 600))
def test_shortest_capped(height: int, width: int, size: int, more: int) -> None:
    expected = get_size_with_aspect_ratio((height, width), size, size + more)
    if min(expected) > 0:
        assert Resize("shortest_capped", size, size, size + more).target(height, width) == expected


@settings(deadline=None)
@given(height=SIDES, width=SIDES, max_height=st.integers(1, 600), max_width=st.integers(1, 600))
def test_within(height: int, width: int, max_height: int, max_width: int) -> None:
    expected = get_image_size_for_max_height_width((height, width), max_height, max_width)
    if min(expected) > 0:
        assert Resize("within", max_height, max_width).target(height, width) == expected


@pytest.mark.parametrize("crop", [1, 2, 7, 8, 40])
def test_the_numpy_crop(crop: int) -> None:
    for size in range(1, 50):
        line = np.arange(1, size + 1, dtype=np.uint8)[None, None].repeat(crop, axis=1)
        expected = center_crop(line, (crop, crop), input_data_format=ChannelDimension.FIRST)[0, 0]
        span = center_span(size, crop, pad_before="ceil")
        found = np.zeros(crop, dtype=np.uint8)
        found[span.offset : span.offset + span.length] = line[0, 0, span.start : span.start + span.length]
        assert np.array_equal(found, expected)
