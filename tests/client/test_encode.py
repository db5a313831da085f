"""Items in, arrays out: every kind of source, every dtype, the options on the wire."""

import io
import pickle

import numpy as np
import pytest
from PIL import Image

from encoder.client import EncodeError, EncodeResult
from encoder.v1 import encoder_pb2 as pb
from tests.client.formula import DIMENSIONS, bits_of, expected, expected_rows, int8_of, pixel_payload

PAYLOADS = [b"one", b"two", b"three", b"four", b"five"]
RNG = np.random.default_rng(7)
RGB = RNG.integers(0, 256, (4, 3, 3), dtype=np.uint8)
RGBA = RNG.integers(0, 256, (2, 5, 4), dtype=np.uint8)
GREY = RNG.integers(0, 256, (6, 2), dtype=np.uint8)


def test_every_kind_of_image_in_one_call(client, tmp_path):
    path = tmp_path / "picture.jpg"
    path.write_bytes(b"content of a file")
    images = [
        str(path),
        path,
        b"encoded",
        bytearray(b"buffer"),
        memoryview(b"view"),
        RGB,
        RGBA,
        GREY,
        GREY[:, :, None],
        RGB[::-1, ::2],
        Image.fromarray(RGB),
        Image.fromarray(RGBA),
        Image.fromarray(GREY),
    ]
    payloads = [
        b"content of a file",
        b"content of a file",
        b"encoded",
        b"buffer",
        b"view",
        pixel_payload(RGB),
        pixel_payload(RGBA),
        pixel_payload(GREY),
        pixel_payload(GREY),
        pixel_payload(RGB[::-1, ::2]),
        pixel_payload(RGB),
        pixel_payload(RGBA),
        pixel_payload(GREY),
    ]
    vectors = client.encode_images(images)
    assert vectors.dtype == np.float32
    np.testing.assert_array_equal(vectors, expected_rows(payloads))
    vectors *= 2  # the caller's own, not a view on something read-only


def test_a_stack_of_arrays_counts_as_many_images(client):
    stack = np.stack([RGB, RGB[::-1]])
    np.testing.assert_array_equal(
        client.encode_images(stack), expected_rows([pixel_payload(RGB), pixel_payload(RGB[::-1])])
    )


def test_a_generator_may_use_its_buffer_again(connect):
    def frames():
        buffer = np.zeros((2, 2, 3), dtype=np.uint8)
        for value in range(5):
            buffer[:] = value
            yield buffer

    payloads = [pixel_payload(np.full((2, 2, 3), value, dtype=np.uint8)) for value in range(5)]
    np.testing.assert_array_equal(connect(batch_size=3).encode_images(frames()), expected_rows(payloads))


@pytest.mark.parametrize("dimensions", [0, 5])
@pytest.mark.parametrize("normalize", [True, False])
def test_float32_and_float16(client, dimensions, normalize):
    rows = expected_rows(PAYLOADS, dimensions=dimensions, normalize=normalize)
    options = {"dimensions": dimensions, "normalize": normalize}
    np.testing.assert_array_equal(client.encode_images(PAYLOADS, **options), rows)
    half = client.encode_images(PAYLOADS, dtype="float16", **options)
    assert half.dtype == np.float16
    np.testing.assert_array_equal(half, rows.astype(np.float16))


def test_int8_with_its_scales(client):
    rows = expected_rows(PAYLOADS, normalize=False)
    result = client.encode_images(PAYLOADS, dtype="int8", normalize=False, on_error="mask")
    quantised = [int8_of(row) for row in rows]
    assert result.vectors.dtype == np.int8
    np.testing.assert_array_equal(result.vectors, np.stack([q for q, _ in quantised]))
    np.testing.assert_array_equal(result.scales, np.array([scale for _, scale in quantised], dtype=np.float32))
    by_hand = np.stack([q.astype(np.float32) * scale for q, scale in quantised])
    np.testing.assert_array_equal(result.float32(), by_hand)
    assert np.abs(result.float32() - rows).max() <= result.scales.max() / 2 * 1.001


def test_binary_bits(client):
    result = client.encode_images(PAYLOADS, dtype="binary", on_error="mask")
    assert result.vectors.dtype == np.uint8
    assert result.vectors.shape == (5, 2) and result.dimensions == DIMENSIONS == 12
    np.testing.assert_array_equal(result.vectors, np.stack([bits_of(expected(p)) for p in PAYLOADS]))
    with pytest.raises(ValueError, match="Hamming"):
        result.float32()
    np.testing.assert_array_equal(
        client.encode_images(PAYLOADS, dtype="binary", dimensions=3),
        np.stack([bits_of(expected(p, 3)) for p in PAYLOADS]),
    )


def test_texts(client):
    texts = ["a cat", "ünïcödé ✓", "one two three four five six"]
    np.testing.assert_array_equal(client.encode_text(texts), expected_rows(texts))
    result = client.encode_text(texts, on_error="mask")
    np.testing.assert_array_equal(result.token_counts, [4, 4, 8])
    np.testing.assert_array_equal(result.truncated, [False, False, True])
    refused = client.encode_text(texts, overflow="refuse", on_error="mask")
    assert list(refused.errors) == [2] and refused.errors[2].message == "8 tokens, the model takes 7"
    np.testing.assert_array_equal(refused.token_counts, [4, 4, 8])
    np.testing.assert_array_equal(refused.truncated, [False, False, False])


def test_options_travel(connect, service):
    client = connect(model="clip-b")
    client.encode_images([b"x"], dtype="int8", dimensions=4, normalize=False, pool="vision-npu")
    client.encode_text(["x"], overflow="refuse")
    image, text = (call.request.options for call in service.seen)
    assert image == pb.EncodeOptions(
        model="clip-b", dtype=pb.EMBEDDING_DTYPE_INT8, dimensions=4, normalize=False, pool="vision-npu"
    )
    assert text == pb.EncodeOptions(
        model="clip-b", dtype=pb.EMBEDDING_DTYPE_FLOAT32, normalize=True, text_overflow=pb.TEXT_OVERFLOW_REFUSE
    )


def test_full_result(client):
    result = client.encode_images([b"x", b"y"], on_error="mask")
    assert isinstance(result, EncodeResult) and len(result) == 2
    assert result.ok.all() and not result.errors
    assert result.scales is None and result.token_counts is None and result.truncated is None
    assert result.fingerprints == ("f1",)
    assert [p.pool for p in result.provenance] == ["vision-cpu"]
    assert [t.forward_ms for t in result.timings] == [1.5]
    assert result.batches[0].attempts == 1
    assert result.raise_for_errors() is result.vectors


def test_nothing_to_encode(client, service):
    assert client.encode_images([]).shape == (0, 0)
    assert client.encode_images([], dimensions=5).shape == (0, 5)
    assert client.encode_images(iter([]), dtype="binary", dimensions=12).shape == (0, 2)
    assert client.encode_text([], on_error="mask").token_counts.shape == (0,)
    assert not service.seen


@pytest.mark.parametrize(
    ("images", "named"),
    [
        ("cat.jpg", "one str: write encode_images"),
        (b"bytes", "one bytes"),
        (bytearray(b"bytes"), "one bytearray"),
        (RGB, "one ndarray"),
        (GREY, "one ndarray"),
        (Image.fromarray(RGB), "one Image"),
        (7, "got int"),
        (None, "got NoneType"),
    ],
)
def test_one_image_is_a_type_error(client, service, images, named):
    with pytest.raises(TypeError, match=named):
        client.encode_images(images)
    assert not service.seen


def test_one_path_and_one_text_are_type_errors(client, tmp_path):
    with pytest.raises(TypeError, match=r"encode_images\(\[item\]\)"):
        client.encode_images(tmp_path / "cat.jpg")
    with pytest.raises(TypeError, match=r"encode_text\(\[item\]\)"):
        client.encode_text("a cat")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": "float64"}, "dtype is 'float64': pass one of float32, float16, int8, binary"),
        ({"dimensions": -1}, "dimensions is -1"),
        ({"on_error": "ignore"}, "on_error is 'ignore'"),
        ({"timeout": 0}, "timeout is 0"),
    ],
)
def test_wrong_arguments_are_value_errors(client, options, message):
    with pytest.raises(ValueError, match=message):
        client.encode_images([b"x"], **options)


def test_wrong_overflow_is_a_value_error(client):
    with pytest.raises(ValueError, match="overflow is 'cut'"):
        client.encode_text(["x"], overflow="cut")


def test_results_and_errors_survive_pickling(client):
    with pytest.raises(EncodeError) as caught:
        client.encode_images([b"x", b"BAD"])
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.errors == caught.value.errors
    np.testing.assert_array_equal(again.result.vectors, caught.value.result.vectors)


def jpeg_with_orientation(image: Image.Image, orientation: int) -> bytes:
    exif = Image.Exif()
    exif[0x0112] = orientation
    buffer = io.BytesIO()
    image.save(buffer, "PNG", exif=exif)
    return buffer.getvalue()


def test_pil_images_are_turned_upright(client):
    picture = Image.open(io.BytesIO(jpeg_with_orientation(Image.fromarray(RGB), 6)))
    # Orientation 6: the stored picture has to be turned clockwise by 90 degrees.
    upright = np.ascontiguousarray(np.rot90(RGB, k=-1))
    np.testing.assert_array_equal(client.encode_images([picture]), expected_rows([pixel_payload(upright)]))
    assert picture.size == (3, 4), "the caller's image is not turned"


DEEP = np.array([[0, 255, 256, 65535]], dtype=np.uint16)


@pytest.mark.parametrize(
    ("image", "pixels"),
    [
        (Image.fromarray(np.array([[True, False]])), np.array([[255, 0]], dtype=np.uint8)),
        (Image.fromarray(DEEP), np.array([[0, 0, 1, 255]], dtype=np.uint8)),
        (Image.new("LA", (1, 1), (9, 77)), np.array([[[9, 9, 9, 77]]], dtype=np.uint8)),
        (Image.new("CMYK", (1, 1), (0, 255, 255, 0)), np.array([[[255, 0, 0]]], dtype=np.uint8)),
        (Image.fromarray(RGB).quantize(64), RGB),
    ],
    ids=["1", "I;16", "LA", "CMYK", "P"],
)
def test_other_pil_modes(client, image, pixels):
    np.testing.assert_array_equal(client.encode_images([image]), expected_rows([pixel_payload(pixels)]))


def test_a_transparent_palette_becomes_rgba(client):
    image = Image.new("P", (2, 1))
    image.putpalette([10, 20, 30, 40, 50, 60])
    image.putpixel((1, 0), 1)
    image.info["transparency"] = 1
    pixels = np.array([[[10, 20, 30, 255], [40, 50, 60, 0]]], dtype=np.uint8)
    np.testing.assert_array_equal(client.encode_images([image]), expected_rows([pixel_payload(pixels)]))
