"""Patch features through both clients: values, grids, failures, streams, arguments that cannot be."""

import numpy as np
import pytest

from encoder.client import EncodeError, Features
from encoder.v1 import encoder_pb2 as pb
from tests.client.formula import expected_rows, patch_numbers

PAYLOADS = [b"one", b"three", b"seven", b"elevens"]


def check(features: Features, payload: bytes, dtype: type = np.float32) -> None:
    rows, columns, numbers = patch_numbers(payload)
    assert features.grid == (rows, columns) and features.values.dtype == dtype
    np.testing.assert_array_equal(features.values, np.array(numbers, dtype).reshape(rows * columns, 3))
    np.testing.assert_array_equal(features.as_grid()[1, 0], features.values[columns])


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a_list_in_the_order_of_the_images(connect, service, dtype):
    found = connect(batch_size=3).encode_images(PAYLOADS, output="tokens", dtype=dtype)
    assert isinstance(found, list) and len(found) == 4
    for features, payload in zip(found, PAYLOADS, strict=True):
        check(features, payload, np.dtype(dtype).type)
    options = service.seen[0].request.options
    assert options.output == pb.OUTPUT_KIND_TOKENS and options.normalize is False


def test_vectors_stay_what_they_were(client, service):
    np.testing.assert_array_equal(client.encode_images(PAYLOADS), expected_rows(PAYLOADS))
    assert service.seen[0].request.options == pb.EncodeOptions(dtype=pb.EMBEDDING_DTYPE_FLOAT32, normalize=True)


def test_failed_items_leave_a_gap(connect):
    payloads = [b"one", b"BAD", b"SHORT1", b"GRID1", b"OTHER1", b"MUTE", b"two", b"LONG1"]
    client = connect(batch_size=2)
    result = client.encode_images(payloads, output="tokens", on_error="mask")
    assert result.ok.tolist() == [True, *[False] * 5, True, False]
    assert [features is not None for features in result.features] == result.ok.tolist()
    check(result.features[0], b"one")
    check(result.features[6], b"two")
    assert result.vectors.shape == (8, 0) and result.dimensions == 3
    messages = {index: error.message for index, error in result.errors.items()}
    assert "no picture" in messages[1]
    assert "bytes for" in messages[2] and "a grid of" in messages[3]
    assert "neither features nor an error" in messages[4] and "neither features nor an error" in messages[5]
    assert "features of 18 dimensions where 3 are due" in messages[7]
    with pytest.raises(EncodeError) as failed:
        client.encode_images(payloads, output="tokens")
    check(failed.value.result.features[6], b"two")


def test_no_images_give_an_empty_list(client):
    assert client.encode_images([], output="tokens") == []


def test_stream(client):
    items = [*PAYLOADS, b"BAD"]
    found = sorted(client.encode_stream(items, output="tokens"), key=lambda result: result.index)
    for result, payload in zip(found[:4], PAYLOADS, strict=True):
        assert result.vector is None and result.dimensions == 3
        check(result.features, payload)
    assert not found[4].ok and found[4].features is None
    (plain,) = client.encode_stream([b"one"])
    assert plain.features is None
    np.testing.assert_array_equal(plain.vector, expected_rows([b"one"])[0])


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"output": "patches"}, "output is 'patches'"),
        ({"output": "tokens", "dtype": "int8"}, "dtype is 'int8' with output='tokens'"),
        ({"output": "tokens", "dimensions": 4}, "dimensions is 4 with output='tokens'"),
        ({"output": "tokens", "normalize": True}, "normalize is True with output='tokens'"),
    ],
)
def test_arguments_that_cannot_be(client, service, arguments, message):
    with pytest.raises(ValueError, match=message):
        client.encode_images([b"x"], **arguments)
    assert service.seen == []
