"""Items that fail alone: what the client refuses, what the service refuses, and what breaks the contract."""

import io
import math

import numpy as np
import pytest
from PIL import Image

from encoder.client import EncodeError, ItemError
from tests.client.formula import expected, expected_rows

CAP = 2**16


class Odd:
    pass


def truncated_picture() -> Image.Image:
    buffer = io.BytesIO()
    Image.effect_noise((64, 64), 50).save(buffer, "PNG")
    return Image.open(io.BytesIO(buffer.getvalue()[:500]))


REFUSED = {
    "missing": (lambda folder: folder / "missing.jpg", "missing.jpg", "cannot read: No such file or directory"),
    "folder": (lambda folder: folder, "", "cannot read: not a regular file"),
    "null byte": (lambda folder: "a\0b", "a\0b", "cannot read: "),
    "float array": (lambda _: np.zeros((2, 2, 3)), "array", "the array is float64: pass uint8"),
    "int array": (lambda _: np.zeros((2, 2, 3), np.int16), "array", "the array is int16: pass uint8"),
    "channels first": (lambda _: np.zeros((3, 8, 8), np.uint8), "array", "shape (3, 8, 8): pass [h, w] or"),
    "two channels": (lambda _: np.zeros((8, 8, 2), np.uint8), "array", "shape (8, 8, 2): pass [h, w] or"),
    "no pixels": (lambda _: np.zeros((0, 8, 3), np.uint8), "array", "there are no pixels in it"),
    "vector": (lambda _: np.zeros(8, np.uint8), "array", "pass [h, w] or"),
    "type": (lambda _: Odd(), "Odd", "Odd is no image: pass a path, the bytes of a file"),
    "nothing": (lambda _: None, "NoneType", "NoneType is no image"),
    "too large": (lambda _: bytes(CAP), "bytes", "65536 bytes do not fit into a message"),
    "PIL float": (lambda _: Image.new("F", (2, 2)), "PIL image", "PIL mode F has no fixed range"),
    "PIL cut": (lambda _: truncated_picture(), "PIL image", "PIL cannot decode it: "),
}


@pytest.mark.parametrize("case", REFUSED)
def test_the_client_refuses_an_item_alone(connect, service, tmp_path, case):
    make, name, message = REFUSED[case]
    result = connect(max_message_bytes=CAP).encode_images([b"x", make(tmp_path), b"y"], on_error="mask")
    assert list(result.errors) == [1]
    error = result.errors[1]
    assert (error.index, error.code) == (1, "INVALID_ARGUMENT")
    assert error.source.endswith(name) and message in error.message and "\n" not in error.message
    assert result.ok.tolist() == [True, False, True]
    np.testing.assert_array_equal(result.vectors[[0, 2]], expected_rows([b"x", b"y"]))
    assert np.isnan(result.vectors[1]).all()
    assert [len(call.request.images) for call in service.seen] == [2]


@pytest.mark.parametrize(
    ("text", "message"),
    [("a \ud800 b", "lone surrogate at position 2"), (7, "a text must be a str, not int"), (b"x", "not bytes")],
)
def test_texts_that_cannot_be_sent(client, text, message):
    result = client.encode_text(["x", text], on_error="mask")
    assert message in result.errors[1].message and result.errors[1].source == "text"
    np.testing.assert_array_equal(result.vectors[0], expected("x"))
    assert result.token_counts.tolist() == [3, 0]


def test_the_service_refuses_an_item_alone(client):
    result = client.encode_images([b"x", b"BAD", b"y"], on_error="mask")
    assert result.errors == {
        1: ItemError(1, "bytes", "INVALID_ARGUMENT", "cannot decode it: no picture; send JPEG or PNG")
    }
    assert np.isnan(result.vectors[1]).all()
    assert np.isnan(result.float32()[1]).all()


@pytest.mark.parametrize("dtype", ["int8", "binary"])
def test_failed_rows_are_zero_where_there_is_no_nan(client, dtype):
    result = client.encode_images([b"BAD", b"y"], dtype=dtype, on_error="mask")
    assert not result.vectors[0].any() and result.vectors[1].any()
    assert result.ok.tolist() == [False, True]
    if dtype == "int8":
        assert result.scales[0] == 0 and np.isnan(result.float32()[0]).all()


def test_raise_names_the_failed_and_keeps_the_good(connect, tmp_path):
    images = [b"x", tmp_path / "gone.jpg", b"BAD 1", b"y", b"BAD 2", b"BAD 3"]
    with pytest.raises(EncodeError) as caught:
        connect(batch_size=2).encode_images(images)
    error = caught.value
    assert str(error) == (
        f"4 of 6 items failed: #1 ({tmp_path / 'gone.jpg'}): INVALID_ARGUMENT: cannot read: No such file or directory; "
        "#2 (bytes): INVALID_ARGUMENT: cannot decode it: no picture; send JPEG or PNG; "
        "#4 (bytes): INVALID_ARGUMENT: cannot decode it: no picture; send JPEG or PNG; and 1 more; "
        ".errors lists all, .result has the others"
    )
    assert [item.index for item in error.errors] == [1, 2, 4, 5]
    assert error.code == "INVALID_ARGUMENT"
    np.testing.assert_array_equal(error.result.vectors[error.result.ok], expected_rows([b"x", b"y"]))


def test_all_items_failed(client, service):
    result = client.encode_images([b"BAD", None], on_error="mask", dimensions=4)
    assert result.vectors.shape == (2, 4) and np.isnan(result.vectors).all()
    assert client.encode_images([b"BAD"], on_error="mask").vectors.shape == (1, 0)
    before = len(service.seen)
    with pytest.raises(EncodeError, match="2 of 2 items failed"):
        client.encode_images([None, None])
    assert len(service.seen) == before, "nothing was left to send"


@pytest.mark.parametrize(
    ("payload", "message"),
    [
        (b"MUTE", "neither an embedding nor an error"),
        (b"SHORT", "47 bytes for 12 dimensions of float32"),
        (b"LONG", "a vector of 13 dimensions where 12 are due"),
        (b"OTHER", "asked for float32, answered with dtype 2"),
    ],
)
def test_an_answer_that_breaks_the_contract(client, payload, message):
    result = client.encode_images([b"x", payload, b"y"], on_error="mask")
    assert list(result.errors) == [1] and result.errors[1].code == "INTERNAL"
    assert message in result.errors[1].message
    np.testing.assert_array_equal(result.vectors[[0, 2]], expected_rows([b"x", b"y"]))


def test_other_dimensions_than_asked_for(client):
    result = client.encode_images([b"LONG"], dimensions=5, on_error="mask")
    assert "13 dimensions where 5 are due" in result.errors[0].message


def test_batches_of_different_dimensions_do_not_share_an_array(connect):
    client = connect(batch_size=1, concurrency=1)
    result = client.encode_images([b"x", b"LONG", b"y"], on_error="mask")
    assert result.errors[1].message == "13 dimensions beside vectors of 12: name a model= and a pool="
    assert result.vectors.shape == (3, 12) and result.ok.tolist() == [True, False, True]
    assert math.isnan(result.vectors[1, 0])
