"""Packing held against hand-computed values and numpy's own integer views."""

import numpy as np
import pytest

from encoder.errors import InvalidInput
from encoder.outputs import FinishedVector, NonFiniteVector, OutputOptions, finish, normalize_rows, quantize_int8


def one(vector: list[float], **options: object) -> FinishedVector:
    found = finish(np.array([vector], np.float32), OutputOptions(**options))[0]  # type: ignore[arg-type]
    assert isinstance(found, FinishedVector)
    return found


def test_float32_is_normalised_and_little_endian() -> None:
    found = one([3.0, 4.0])
    assert found.dimensions == 2 and found.dtype == "float32"
    assert np.frombuffer(found.values, "<f4").tolist() == pytest.approx([0.6, 0.8], abs=1e-7)


def test_truncation_comes_before_normalisation() -> None:
    # Normalised first, the kept part would have length 5/13.
    assert np.frombuffer(one([3.0, 4.0, 12.0], dimensions=2).values, "<f4").tolist() == pytest.approx([0.6, 0.8])


def test_without_normalisation_values_stay() -> None:
    assert np.frombuffer(one([3.0, 4.0], normalize=False).values, "<f4").tolist() == [3.0, 4.0]


def test_float16_rounds_to_nearest_even() -> None:
    # 2049 lies between 2048 and 2050 in binary16: the even one is 2048; 2051 goes to 2052.
    found = one([2049.0, 2051.0], dtype="float16", normalize=False)
    assert np.frombuffer(found.values, "<f2").tolist() == [2048.0, 2052.0]


def test_float16_out_of_range_is_an_error_and_spares_the_neighbour() -> None:
    options = OutputOptions(dtype="float16", normalize=False)
    bad, good = finish(np.array([[1e6, 0], [1, 0]], np.float32), options)
    assert isinstance(bad, InvalidInput) and isinstance(good, FinishedVector)


def test_int8_levels_by_hand() -> None:
    # max 0.127 → scale 0.001; 0.0625 → 62.5 rounds to the even 62, 0.0635 → 63.5 to the even 64.
    levels, scale = quantize_int8(np.array([0.127, -0.127, 0.05, 0.0], np.float32))
    assert levels.tolist() == [127, -127, 50, 0]
    assert scale == pytest.approx(0.001, rel=1e-6)
    halves, _ = quantize_int8(np.array([127.0, 62.5, 63.5, -62.5], np.float32))
    assert halves.tolist() == [127, 62, 64, -62]


def test_int8_of_a_zero_vector_is_zero() -> None:
    found = one([0.0, 0.0, 0.0], dtype="int8")
    assert found.values == b"\0\0\0" and found.scale == 0.0


def test_int8_keeps_the_vector_within_half_a_level() -> None:
    vector = np.random.default_rng(1).normal(size=512).astype(np.float32)
    found = one(vector.tolist(), dtype="int8")
    unit = vector / np.linalg.norm(vector)
    restored = np.frombuffer(found.values, np.int8) * np.float32(found.scale)
    assert np.abs(restored - unit).max() <= found.scale / 2 * 1.0001


def test_binary_bits_are_big_endian_strict_and_zero_filled() -> None:
    # Bits: + - 0 + - - - + | + → 1 0 0 1 0 0 0 1, 1 0000000
    found = one([1, -1, 0, 2, -3, -1, -1, 5, 0.1], dtype="binary")
    assert found.values == bytes([0b10010001, 0b10000000]) and found.dimensions == 9


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_vector_that_is_not_finite_is_never_sent(bad: float) -> None:
    rows = finish(np.array([[1.0, bad], [3.0, 4.0]], np.float32), OutputOptions())
    assert isinstance(rows[0], NonFiniteVector) and rows[0].code == "INTERNAL"
    assert isinstance(rows[1], FinishedVector)


@pytest.mark.parametrize("dimensions", [-1, 3, 10_000])
def test_dimensions_outside_the_model_are_refused(dimensions: int) -> None:
    with pytest.raises(InvalidInput, match="dimensions"):
        finish(np.ones((1, 2), np.float32), OutputOptions(dimensions=dimensions))


def test_unknown_dtype_is_refused() -> None:
    with pytest.raises(InvalidInput, match="float64"):
        finish(np.ones((1, 2), np.float32), OutputOptions(dtype="float64"))  # type: ignore[arg-type]


def test_dimensions_count_components_not_packed_bytes() -> None:
    found = one([1.0] * 64, dtype="binary", dimensions=40)
    assert found.dimensions == 40 and len(found.values) == 5


def test_tiny_and_huge_rows_normalise_to_length_one() -> None:
    rows = normalize_rows(np.array([[1e-30, 1e-30], [1e30, 1e30]], np.float32))
    assert np.linalg.norm(rows, axis=1) == pytest.approx([1.0, 1.0], abs=1e-6)
