"""A broken file and one of a kind that nobody here reads get different words, and a different next step."""

import struct
import zlib

import numpy as np
import pytest
from PIL import Image, UnidentifiedImageError

from encoder.errors import InvalidImage
from encoder.preprocess.complaints import complaint
from encoder.preprocess.decode import decode_image
from tests.preprocess.pictures import file_of, photo, pillow, png_file, tiff_file


def other_kind(name: str, kind: str) -> str:
    return f"{name} of a kind that is not supported ({kind}); save it as PNG or JPEG"


def broken(name: str, reason: str) -> str:
    return f"broken {name}: {reason}; send the whole, undamaged file"


def refusal(data: bytes) -> str:
    with pytest.raises(InvalidImage) as caught:
        decode_image(data)
    return str(caught.value)


def bmp(bits: int, compression: int, *masks: int, header: int = 40) -> bytes:
    """A BMP of 2x1 pixels by hand."""
    info = struct.pack("<IiiHHIIiiII", header, 2, 1, 1, bits, compression, 8, 0, 0, 0, 0)
    body = info + struct.pack(f"<{len(masks)}I", *masks)
    return b"BM" + struct.pack("<IHHI", 14 + len(body) + 8, 0, 0, 14 + len(body)) + body + bytes(8)


class TestBmp:
    @pytest.mark.parametrize(
        ("data", "kind"),
        [
            (bmp(32, 3, 0xFF000, 0xFF0, 0xFF), "bitfields layout"),
            (bmp(16, 3, 0xF00, 0xF0, 0xF), "bitfields layout"),
            (bmp(2, 0), "pixel depth (2)"),
            (bmp(24, 4), "compression (4)"),
            (bmp(8, 0, header=16), "header type (16)"),
        ],
    )
    def test_kinds_that_pillow_has_no_reader_for(self, data: bytes, kind: str) -> None:
        with pytest.raises(OSError, match="Unsupported BMP"):
            pillow(data)
        assert refusal(data) == other_kind("BMP", kind)

    def test_usual_masks_are_read(self) -> None:
        assert decode_image(bmp(32, 3, 0xFF0000, 0xFF00, 0xFF)).shape == (1, 2, 3)

    def test_one_that_ends_early_is_broken(self) -> None:
        data = file_of(photo(20, 30), "BMP")[:-5]
        assert refusal(data) == broken("BMP", "the data ends before the picture does")


@pytest.mark.filterwarnings("ignore:Corrupt EXIF")
class TestTiff:
    colour: dict[int, tuple[int, int | list[int]]] = {  # noqa: RUF012
        256: (4, 1), 257: (4, 1), 258: (3, [32] * 3), 259: (3, 1), 262: (3, 2), 277: (3, 3), 278: (4, 1), 279: (4, 12),
    }  # fmt: skip

    @pytest.mark.parametrize(
        ("entries", "kind"),
        [
            ({}, "3 samples of 32 bits a pixel"),
            ({339: (3, [3, 3, 3])}, "3 floating point samples of 32 bits a pixel"),
            ({258: (3, [64] * 3), 339: (3, 3)}, "3 floating point samples of 64 bits a pixel"),
            ({258: (3, [8] * 5), 262: (3, 5), 277: (3, 5), 338: (3, 2)}, "5 samples of 8 bits a pixel"),
        ],
    )
    def test_samples_that_have_no_mode(self, entries: dict[int, tuple[int, int | list[int]]], kind: str) -> None:
        message = refusal(tiff_file({**self.colour, **entries}, bytes(24)))
        assert message == other_kind("TIFF", kind)

    @pytest.mark.parametrize(("number", "kind"), [(50001, "WebP"), (34887, "LERC"), (50002, "JPEG XL")])
    def test_rare_compressions(self, number: int, kind: str) -> None:
        """Whether libtiff has them or not: these bytes are of none."""
        entries = {**self.colour, 258: (3, [8] * 3), 259: (3, number)}
        error = OSError("decoder error -2")
        message = complaint(tiff_file(entries, bytes(12)), "TIFF", error)
        assert message == other_kind("TIFF", f"{kind} compression")
        truncated = complaint(tiff_file(entries, bytes(12)), "TIFF", OSError("image file is truncated"))
        assert truncated == broken("TIFF", "the data ends before the picture does")

    def test_big_endian_bigtiff(self) -> None:
        tags = {256: 1, 257: 1, 258: 8, 259: 1, 262: 1, 273: 0, 277: 1, 278: 1, 279: 1}
        tags[273] = 16 + 8 + 20 * len(tags) + 8
        entries = b"".join(struct.pack(">HHQHHI", tag, 3, 1, value, 0, 0) for tag, value in tags.items())
        data = b"MM\0+\0\x08\0\0" + struct.pack(">QQ", 16, len(tags)) + entries + bytes(8) + b"\x07"
        try:
            pillow(data)
        except UnidentifiedImageError:
            assert refusal(data) == other_kind("TIFF", "a big-endian BigTIFF")
        else:  # a Pillow that reads it
            assert decode_image(data).tolist() == [[[7, 7, 7]]]

    def test_damaged_data_is_broken(self) -> None:
        data = bytearray(file_of(photo(40, 61), "TIFF", compression="tiff_adobe_deflate"))
        packed = data.index(b"\x78", 8)
        data[packed : packed + 40] = bytes(40)
        assert refusal(bytes(data)) == broken("TIFF", "its pixel data cannot be decoded")

    @pytest.mark.parametrize("tag", [258, 259, 277, 339])
    @pytest.mark.parametrize("kind", [2, 5, 12])
    def test_tags_of_senseless_types_are_no_matter(self, tag: int, kind: int) -> None:
        entries = {**self.colour, 339: (3, 3)}
        data = bytearray(tiff_file(entries, bytes(24)))
        at = data.index(struct.pack("<HH", tag, 3))
        data[at + 2] = kind
        assert refusal(bytes(data)).startswith(("broken TIFF: ", "TIFF of a kind that is not supported ("))


class TestHeaders:
    """`Image.open` tells that it cannot identify a file; its readers know why."""

    def test_a_pngs_broken_checksum_is_named(self) -> None:
        data = bytearray(png_file(4, 1, 8, 0, bytes(5)))
        data[8 + 8 + 13] ^= 1
        assert refusal(bytes(data)) == broken("PNG", "bad header checksum in IHDR")

    def test_a_png_without_pixels_has_none(self) -> None:
        whole = png_file(4, 1, 8, 0, bytes(5))
        at = whole.index(b"IDAT") - 4
        data = whole[:at] + whole[at + 12 + len(zlib.compress(bytes(5))) :]
        assert refusal(data) == broken("PNG", "it has no pixel data")

    def test_a_gif_without_frames_has_no_pixels(self) -> None:
        head = file_of(photo(20, 30, "L"), "GIF")[:781]  # the signature, the screen, its 256 colours
        assert refusal(head + b";") == broken("GIF", "it has no pixel data")
        assert refusal(head + b"junk;") == broken("GIF", "it has no pixel data")

    @pytest.mark.parametrize("name", ["WEBP", "GIF"])
    def test_a_header_and_junk_are_told_in_words_of_no_programmer(self, name: str) -> None:
        data = file_of(photo(20, 30), name)
        message = refusal(data[:26] + bytes(len(data) - 26))
        assert "identify" not in message and "driver" not in message and "object" not in message

    def test_an_avif_beyond_libavifs_own_limit_is_too_large(self) -> None:
        data = file_of(photo(20, 30), "AVIF").replace(struct.pack(">II", 30, 20), struct.pack(">II", 17_000, 17_000))
        with pytest.raises(UnidentifiedImageError):
            pillow(data)
        assert "17000x17000: over the limit of 64000000 pixels; scale it down" in refusal(data)

    def test_an_avif_that_is_broken_is_so(self) -> None:
        data = file_of(photo(20, 30), "AVIF")
        assert refusal(data[:60]).startswith("broken AVIF: ")


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (KeyError(320), broken("PNG", "its structure is damaged")),
        (SyntaxError(IndexError("x")), broken("PNG", "its structure is damaged")),
        (struct.error("unpack requires a buffer of 4 bytes"), broken("PNG", "its structure is damaged")),
        (ValueError("odd <_io.BytesIO object at 0x7f3a>"), broken("PNG", "odd")),
        (ValueError("two\nlines"), broken("PNG", "two lines")),
        (SystemError(""), broken("PNG", "SystemError")),
        (RuntimeError("Not implemented"), other_kind("PNG", "Not implemented")),
    ],
)
def test_one_line_without_addresses(error: Exception, message: str) -> None:
    assert complaint(b"", "PNG", error) == message


def test_what_is_fine_is_not_complained_of() -> None:
    assert np.array_equal(decode_image(file_of(Image.new("1", (4, 4), 1), "TIFF")), np.full((4, 4, 3), 255))
