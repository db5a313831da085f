"""Packing of patch features, held against struct; options that features cannot have are in tests/deployments."""

import struct

import numpy as np

from encoder.errors import EncoderError, InvalidInput
from encoder.features import FinishedFeatures, feature_bytes, finish_features
from encoder.outputs import NonFiniteVector

NUMBERS = [[1.5, -2.0, 0.25], [3.0, 4.0, -5.5], [0.0, 1024.0, -0.125], [7.0, 8.0, 9.0]]
FEATURES = np.array(NUMBERS, np.float32)
FLAT = [number for row in NUMBERS for number in row]


def test_numbers_row_by_row_little_endian() -> None:
    found = finish_features(FEATURES, (2, 2), "float32")
    assert found == FinishedFeatures(struct.pack("<12f", *FLAT), "float32", 4, 3, (2, 2))
    half = finish_features(FEATURES, (1, 4), "float16")
    assert half == FinishedFeatures(struct.pack("<12e", *FLAT), "float16", 4, 3, (1, 4))
    assert len(half.values) == feature_bytes((1, 4), 3, "float16") == 24
    assert len(found.values) == feature_bytes((2, 2), 3, "float32") == 48


def test_a_view_that_is_not_contiguous_is_packed_alike() -> None:
    wide = np.zeros((4, 5), np.float32)
    wide[:, 1:4] = FEATURES
    assert finish_features(wide[:, 1:4], (2, 2), "float32") == finish_features(FEATURES, (2, 2), "float32")


def test_what_is_not_finite_is_never_packed() -> None:
    for value in (np.nan, np.inf, -np.inf):
        broken = FEATURES.copy()
        broken[2, 1] = value
        for dtype in ("float32", "float16"):
            assert isinstance(finish_features(broken, (2, 2), dtype), NonFiniteVector)


def test_a_number_beyond_float16_is_an_error_there_alone() -> None:
    large = FEATURES.copy()
    large[0, 0] = 70_000
    assert isinstance(finish_features(large, (2, 2), "float32"), FinishedFeatures)
    refused = finish_features(large, (2, 2), "float16")
    assert isinstance(refused, InvalidInput) and "ask for float32" in str(refused)


def test_features_that_are_not_the_grids_are_an_error() -> None:
    found = finish_features(FEATURES, (2, 3), "float32")
    assert isinstance(found, EncoderError) and "4 features for a grid of 2x3" in str(found)
