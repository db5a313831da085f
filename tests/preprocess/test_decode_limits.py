"""Bombs, polyglots, cuts at every byte, junk behind the end, sides of one pixel: Pillow's pixels, or InvalidImage."""

import io
import struct
import zipfile
import zlib

import numpy as np
import pytest

from encoder.errors import InvalidImage
from encoder.preprocess.decode import DecodeLimits, decode_image
from encoder.preprocess.png import MAX_CHUNKS, MAX_METADATA_CHUNKS
from tests.preprocess.pictures import file_of, photo, pillow_rgb, png_chunk, png_file, with_segment

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
FORMATS = ["JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "AVIF"]
ROW = bytes([0, 1, 2, 3, 4])


class TestChunksOfAPng:
    @pytest.mark.parametrize("kind", [b"tEXt", b"zTXt", b"iTXt", b"eXIf", b"prVt", b"sPLT"])
    def test_a_million_beside_the_pixels_are_refused(self, kind: bytes) -> None:
        body = b"k\0\0" + zlib.compress(b"v") if kind == b"zTXt" else b"k\0v"
        data = png_file(4, 1, 8, 0, ROW, png_chunk(kind, body) * 1_000_000)
        with pytest.raises(InvalidImage, match=f"over {MAX_METADATA_CHUNKS} chunks beside its pixels; save it anew"):
            decode_image(data)

    def test_as_many_as_allowed_are_no_matter(self) -> None:
        chunk = png_chunk(b"tEXt", b"k\0v")
        data = png_file(4, 1, 8, 0, ROW, chunk * MAX_METADATA_CHUNKS)
        assert decode_image(data)[0, :, 0].tolist() == [1, 2, 3, 4]
        with pytest.raises(InvalidImage, match="chunks beside its pixels"):
            decode_image(png_file(4, 1, 8, 0, ROW, chunk * (MAX_METADATA_CHUNKS + 1)))

    def test_behind_the_end_they_do_not_count(self) -> None:
        data = png_file(4, 1, 8, 0, ROW) + png_chunk(b"tEXt", b"k\0v") * 5000
        assert decode_image(data)[0, :, 0].tolist() == [1, 2, 3, 4]

    def test_a_million_pieces_of_pixels_are_refused(self) -> None:
        with pytest.raises(InvalidImage, match=f"over {MAX_CHUNKS} chunks"):
            decode_image(png_file(4, 1, 8, 0, ROW, png_chunk(b"IDAT", b"") * 1_000_000))

    def test_pixels_in_pieces_of_one_byte_are_whole(self) -> None:
        packed = zlib.compress(ROW)
        pieces = b"".join(png_chunk(b"IDAT", packed[at : at + 1]) for at in range(len(packed)))
        header = png_chunk(b"IHDR", struct.pack(">IIBBBBB", 4, 1, 8, 0, 0, 0, 0))
        data = b"\x89PNG\r\n\x1a\n" + header + pieces + png_chunk(b"IEND", b"")
        assert decode_image(data)[0, :, 0].tolist() == [1, 2, 3, 4]

    def test_a_profile_that_unpacks_to_128_megabytes_costs_nothing(self) -> None:
        """marqo: a 2 MB PNG with huge metadata failed its batch."""
        packer = zlib.compressobj(9)
        packed = b"".join(packer.compress(bytes(1 << 24)) for _ in range(8)) + packer.flush()
        data = png_file(4, 1, 8, 0, ROW, png_chunk(b"iCCP", b"p\0\0" + packed), png_chunk(b"zTXt", b"k\0\0" + packed))
        assert decode_image(data)[0, :, 0].tolist() == [1, 2, 3, 4]


class TestBombs:
    def test_pixels_that_unpack_to_more_than_the_header_says(self) -> None:
        data = png_file(4, 1, 8, 0, ROW + bytes(50_000_000))
        assert decode_image(data)[0, :, 0].tolist() == [1, 2, 3, 4]

    def test_a_size_over_the_limit_is_refused_before_anything_is_unpacked(self) -> None:
        with pytest.raises(InvalidImage, match="over the limit of 64000000 pixels"):
            decode_image(png_file(30_000, 30_000, 8, 6, b""))

    def test_hundreds_of_segments_of_a_jpeg(self) -> None:
        data = file_of(photo(9, 14), "JPEG")
        whole = data
        for _ in range(400):
            data = with_segment(data, 0xE2, b"ICC_PROFILE\0" + bytes(2000))
        assert np.array_equal(decode_image(data), decode_image(whole))


class TestPolyglots:
    @pytest.mark.parametrize("name", ["JPEG", "PNG", "GIF", "BMP", "WEBP"])
    def test_a_picture_with_an_archive_behind_it_is_the_picture(self, name: str) -> None:
        buffer = io.BytesIO()
        with zipfile.ZipFile(buffer, "w") as archive:
            archive.writestr("a.html", "<script>alert(1)</script>")
        data = file_of(photo(20, 30), name)
        assert np.array_equal(decode_image(data + buffer.getvalue()), decode_image(data))

    def test_a_picture_behind_something_else_is_not_looked_for(self) -> None:
        for head in (b"%PDF-1.4\n", b"<html>", b"\0", b" "):
            with pytest.raises(InvalidImage, match="not a supported picture"):
                decode_image(head + file_of(photo(20, 30), "JPEG"))

    def test_one_format_within_another_ones_texts(self) -> None:
        inner = file_of(photo(9, 9), "PNG")
        data = with_segment(file_of(photo(20, 30), "JPEG"), 0xFE, inner)
        assert decode_image(data).shape == (20, 30, 3)


@pytest.mark.parametrize("name", FORMATS)
def test_junk_behind_the_end_changes_nothing(name: str) -> None:
    data = file_of(photo(20, 30), name)
    for junk in (b"\0", b"\n", b"junk" * 999, bytes(70_000)):
        assert np.array_equal(decode_image(data + junk), decode_image(data))


@pytest.mark.parametrize("name", FORMATS)
def test_a_cut_at_any_byte_gives_an_error_or_the_whole_picture(name: str) -> None:
    """Never half a picture: what decodes is what the whole file gives."""
    data = file_of(photo(17, 23), name)
    whole = decode_image(data)
    intact = 0
    for length in range(len(data)):
        try:
            found = decode_image(data[:length])
        except InvalidImage as error:
            assert "\n" not in str(error)
        else:
            assert np.array_equal(found, whole), length
            intact += 1
    assert intact <= len(data) // 10 + 20


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("size", [(1, 1), (1, 2), (2, 1), (1, 4000), (4000, 1), (3, 3999)])
def test_sides_of_one_pixel_and_extreme_ratios(name: str, size: tuple[int, int]) -> None:
    """infinity: a 1x1 PNG raised, and later requests hung."""
    data = file_of(photo(*size), name)
    found = decode_image(data)
    assert found.shape == (*size, 3)
    assert np.array_equal(found, pillow_rgb(data))


def test_limits_of_one_pixel_hold() -> None:
    one = DecodeLimits(max_pixels=1, max_side=1)
    assert decode_image(file_of(photo(1, 1), "PNG"), one).shape == (1, 1, 3)
    with pytest.raises(InvalidImage):
        decode_image(file_of(photo(1, 2), "PNG"), one)
