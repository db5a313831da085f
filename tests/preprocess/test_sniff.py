"""What a file is, is read from its content; what is not a picture is named."""

import io
import zipfile

import pytest

from encoder.errors import InvalidImage
from encoder.preprocess.decode import decode_image
from encoder.preprocess.sniff import picture_format, webp_size
from tests.preprocess.pictures import file_of, photo, pillow


@pytest.mark.parametrize("name", ["JPEG", "PNG", "GIF", "BMP", "TIFF", "WEBP", "AVIF"])
def test_every_format_is_known_by_its_content(name: str) -> None:
    data = file_of(photo(20, 30), name)
    assert picture_format(data) == pillow(data).format == name


def test_big_endian_tiff() -> None:
    assert picture_format(b"MM\0*" + bytes(8)) == "TIFF"


def _zip() -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("a.txt", "a")
    return buffer.getvalue()


@pytest.mark.parametrize(
    ("data", "seen"),
    [
        (b"", "no bytes"),
        (b"hello world", "starts with bytes 68 65 6c 6c 6f 20 77 6f"),
        (b"\0", "starts with bytes 00"),
        (bytes(30_000_000), "starts with bytes 00 00 00 00 00 00 00 00"),
        (b"\xff\xd8", "starts with bytes ff d8"),
        (b"%PDF-1.7\n", "a PDF"),
        (b"\n  <!DOCTYPE html><html>", "HTML"),
        (b"<svg xmlns='x'/>", "an SVG"),
        (b"<?xml version='1.0'?>\n<!-- made by hand -->\n<svg xmlns='x'/>", "an SVG"),
        (b"<?xml version='1.0'?><note/>", "XML"),
        (b"\0\0\0\x0cjP  \r\n\x87\n", "a JPEG 2000 picture"),
        (b"\xff\x4f\xff\x51\0\x29", "a JPEG 2000 picture"),
        (b"\xff\x0a\xfa\x3f", "a JPEG XL picture"),
        (b"\0\0\0\x0cJXL \r\n\x87\n", "a JPEG XL picture"),
        (b"8BPS\0\1", "a Photoshop file"),
        (b"\0\0\1\0\1\0", "an icon (ICO)"),
        (b"qoif\0\0\0\1", "a QOI picture"),
        (b"P6\n4 4\n255\n", "a portable anymap"),
        (b"\x1aE\xdf\xa3\x01", "a video (Matroska or WebM)"),
        (b"RIFF\x24\0\0\0AVI LIST", "a video (AVI)"),
        (b"RIFF\x24\0\0\0WAVEfmt ", "a RIFF file that is no WebP"),
        (bytes(128) + b"DICM", "a DICOM file"),
        (b"\x93NUMPY\x01\0", "a NumPy file"),
        (b'{"image": "x"}', "JSON text"),
        (b"version https://git-lfs.github.com/spec/v1\n", "a Git LFS pointer"),
        (b"%!PS-Adobe-3.0 EPSF-3.0", "a PostScript file"),
        (b"/9j/4AAQSkZJRg", "base64 text of a JPEG"),
        (b"iVBORw0KGgoAAAANSUhEUg", "base64 text of a PNG"),
        (b"data:image/png;base64,iVBO", "a data URL"),
        (b"https://example.org/cat.jpg", "a URL"),
        (b"\0\0\0\x18ftypheic\0\0\0\0mif1heic", "a HEIC picture"),
        (b"\0\0\0\x18ftypisom\0\0\0\0mp42isom", "a video"),
        (_zip(), "a ZIP"),
    ],
)
def test_what_is_no_picture_is_named(data: bytes, seen: str) -> None:
    with pytest.raises(InvalidImage) as caught:
        decode_image(data)
    message = str(caught.value)
    assert seen in message
    assert message.startswith("not a picture: ")
    assert message.endswith("send JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF")


@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"xmp": b"<x/>"}])
@pytest.mark.parametrize("size", [(1, 1), (20, 333), (1000, 7)])
def test_webp_size_is_in_the_header(size: tuple[int, int], options: dict) -> None:
    data = file_of(photo(*size), "WEBP", **options)
    assert webp_size(data) == pillow(data).size == size[::-1]


def test_webp_size_of_a_broken_header_is_not_known() -> None:
    assert webp_size(b"RIFF\0\0\0\0WEBPVP8X") is None
    assert webp_size(b"RIFF\0\0\0\0WEBPVP8 " + bytes(20)) is None
