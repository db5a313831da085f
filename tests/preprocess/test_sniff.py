"""What a file is, is read from its content; what is not a picture is named."""

import io
import struct
import zipfile

import numpy as np
import pytest

from encoder.errors import InvalidImage
from encoder.preprocess.decode import decode_image
from encoder.preprocess.sniff import avif_size, picture_format, webp_size
from tests.preprocess.pictures import file_of, photo, pillow, pillow_rgb, tiff_file

PNG, JPEG = file_of(photo(9, 9), "PNG"), file_of(photo(9, 9), "JPEG")


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
        (b"\xff\xd8", "a JPEG whose first bytes are damaged"),
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
        (b"\0\0\2\0\1\0\x20\x20", "a cursor (CUR)"),
        (b"\0\0\2\0\0\0", "starts with bytes 00 00 02 00"),
        (b"Pf\n4 4\n-1.0\n", "a portable anymap"),
        (b"\x0a\x05\x01\x08", "a PCX picture"),
        (b"\x01\xda\x01\x01", "an SGI picture"),
        (b"#define im_width 16\n", "an X bitmap"),
        (b"/* XPM */\nstatic char", "an X pixmap"),
        (b"\xd7\xcd\xc6\x9a\0\0", "a Windows metafile"),
        (struct.pack("<2sIIHH2s", b"BA", 40, 0, 0, 0, b"CI"), "an OS/2 icon or bitmap array"),
        (struct.pack("<2sIHH", b"CI", 26, 16, 16), "an OS/2 icon or bitmap array"),
        (b"BA first-rate text", "starts with bytes 42 41 20"),
        (PNG[:4] + b"\n\x1a\n" + PNG[8:], "a PNG whose first bytes are damaged"),
        (PNG.decode(errors="replace").encode(), "bytes were read as text"),
        (PNG.decode("latin-1").encode(), "bytes were read as text"),
        (JPEG.decode(errors="replace").encode(), "bytes were read as text"),
        (JPEG.decode("latin-1").encode(), "bytes were read as text"),
        (file_of(photo(9, 9), "DIB"), "a bitmap without its file header"),
    ],
)
def test_what_is_no_picture_is_named(data: bytes, seen: str) -> None:
    with pytest.raises(InvalidImage) as caught:
        decode_image(data)
    message = str(caught.value)
    assert seen in message
    assert message.startswith("not a supported picture: ")
    assert message.endswith("send JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF")


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGB", "RGBA"])
@pytest.mark.parametrize("compression", [None, "tga_rle"])
@pytest.mark.parametrize("footer", [True, False])
def test_a_tga_is_known_without_a_signature(mode: str, compression: str | None, footer: bool) -> None:
    data = file_of(photo(12, 17).convert(mode), "TGA", compression=compression)
    assert data[-18:-2] == b"TRUEVISION-XFILE"
    if not footer:
        data = data[:-26]
    with pytest.raises(InvalidImage, match="a TGA picture"):
        decode_image(data)


@pytest.mark.parametrize("at", [0, 1, 2, 12, 14, 16])
def test_a_header_that_is_not_quite_a_tgas_is_none(at: int) -> None:
    """Colours of a palette, kind, sides and bits of a pixel, each made senseless in turn."""
    data = bytearray(file_of(photo(12, 17), "TGA")[:-26])
    data[at] = {0: 0, 1: 1, 2: 4, 12: 0, 14: 0, 16: 7}[at]
    with pytest.raises(InvalidImage, match="a TGA picture" if at == 0 else "starts with bytes"):
        decode_image(bytes(data))


@pytest.mark.parametrize(("order", "version"), [(b"II", b"\0*"), (b"MM", b"*\0")])
def test_a_tiff_whose_version_has_the_wrong_byte_order_is_read_as_pillow_does(order: bytes, version: bytes) -> None:
    entries: dict[int, tuple[int, int | list[int]]] = {
        256: (4, 3), 257: (4, 1), 258: (3, 8), 259: (3, 1), 262: (3, 1), 277: (3, 1), 278: (4, 1), 279: (4, 3),
    }  # fmt: skip
    data = tiff_file(entries, bytes([1, 2, 3]), "<" if order == b"II" else ">")
    swapped = order + version + data[4:]
    assert np.array_equal(decode_image(swapped), pillow_rgb(swapped))
    assert decode_image(swapped)[0, :, 0].tolist() == [1, 2, 3]


@pytest.mark.parametrize("options", [{}, {"lossless": True}, {"xmp": b"<x/>"}])
@pytest.mark.parametrize("size", [(1, 1), (20, 333), (1000, 7)])
def test_webp_size_is_in_the_header(size: tuple[int, int], options: dict) -> None:
    data = file_of(photo(*size), "WEBP", **options)
    assert webp_size(data) == pillow(data).size == size[::-1]


@pytest.mark.parametrize("size", [(1, 1), (20, 333)])
def test_avif_size_is_among_its_properties(size: tuple[int, int]) -> None:
    assert avif_size(file_of(photo(*size), "AVIF")) == size[::-1]
    assert avif_size(b"\0\0\0\x18ftypavif") == (1, 1)


def test_webp_size_of_a_broken_header_is_not_known() -> None:
    assert webp_size(b"RIFF\0\0\0\0WEBPVP8X") is None
    assert webp_size(b"RIFF\0\0\0\0WEBPVP8 " + bytes(20)) is None
