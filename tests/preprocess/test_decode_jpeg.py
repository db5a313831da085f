"""JPEG: bit-equal to Pillow's reader, CMYK by Adobe's marker, and nothing missing goes unseen."""

import numpy as np
import pytest
import simplejpeg
from PIL import Image, ImageFile

from encoder.errors import InvalidImage
from encoder.preprocess.decode import DecodePolicy, decode_image
from encoder.preprocess.jpeg import read_jpeg
from tests.preprocess.pictures import file_of, photo, pillow, pillow_rgb, with_segment, without_segment

SIZES = [(1, 1), (1, 2000), (2000, 1), (7, 13), (16, 16), (17, 33), (101, 99), (480, 640)]
TOLERANT = DecodePolicy(allow_truncated=True)


def fast(data: bytes) -> np.ndarray | None:
    """The libjpeg-turbo path alone."""
    image = pillow(data)
    return read_jpeg(data, image.size, adobe="adobe" in image.info, one_scan=True, allow_truncated=False)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("mode", ["RGB", "L"])
@pytest.mark.parametrize("progressive", [False, True], ids=["baseline", "progressive"])
def test_is_bit_equal_to_pillow(size: tuple[int, int], mode: str, progressive: bool) -> None:
    for sampling in ("4:4:4", "4:2:2", "4:2:0"):
        for quality in (1, 50, 75, 95, 100) if size[0] < 400 else (75, 95):
            options = {"quality": quality, "subsampling": sampling, "progressive": progressive}
            data = file_of(photo(*size, mode, seed=quality), "JPEG", **options)
            expected = pillow_rgb(data)
            found = fast(data)
            assert found is not None and np.array_equal(found, expected)
            assert np.array_equal(decode_image(data), expected)


def test_jpeg_that_holds_rgb() -> None:
    data = file_of(photo(101, 203), "JPEG", keep_rgb=True)
    assert simplejpeg.decode_jpeg_header(data)[2] == "RGB"
    assert np.array_equal(decode_image(data), pillow_rgb(data))


@pytest.mark.parametrize("sampling", ["444", "422", "420", "440", "411", "Gray"])
def test_rare_sampling_factors(sampling: str) -> None:
    pixels = np.asarray(photo(101, 203))
    data = simplejpeg.encode_jpeg(np.ascontiguousarray(pixels), colorsubsampling=sampling)
    assert np.array_equal(decode_image(data), pillow_rgb(data))


def test_sampling_factors_the_fast_path_does_not_know() -> None:
    data = bytearray(file_of(photo(64, 64), "JPEG", subsampling="4:4:4", quality=90))
    frame = data.index(b"\xff\xc0")
    for component in range(3):  # 3x1 samples in each component: a grid of its own, yet of no common name
        data[frame + 11 + 3 * component] = 0x31
    assert fast(bytes(data)) is None
    with pytest.raises(InvalidImage):
        decode_image(bytes(data)[:200])


def test_the_array_is_writable_contiguous_rgb() -> None:
    found = decode_image(memoryview(file_of(photo(20, 30), "JPEG")))
    assert found.dtype == np.uint8 and found.shape == (20, 30, 3)
    assert found.flags.c_contiguous and found.flags.writeable


class TestInk:
    def test_cmyk_of_adobe_equals_pillow(self) -> None:
        data = file_of(photo(60, 90, "CMYK"), "JPEG", quality=90)
        assert pillow(data).info["adobe_transform"] == 0
        assert np.array_equal(decode_image(data), pillow_rgb(data))

    def test_ycck_of_adobe_equals_pillow(self) -> None:
        ink = 255 - np.asarray(photo(60, 90, "CMYK"))
        data = simplejpeg.encode_jpeg(np.ascontiguousarray(ink), colorspace="CMYK", quality=90)
        assert pillow(data).info["adobe_transform"] == 2
        assert np.array_equal(decode_image(data), pillow_rgb(data))

    @pytest.mark.parametrize("junk", [b"", b"\0" * 9], ids=["fast path", "Pillow's path"])
    def test_without_adobes_marker_ink_is_stored_as_it_is(self, junk: bytes) -> None:
        red_ink = Image.new("CMYK", (32, 32), (0, 255, 255, 0))
        inverted = Image.fromarray(255 - np.asarray(red_ink), mode="CMYK")  # Pillow inverts when it writes
        data = without_segment(file_of(inverted, "JPEG", quality=100), 0xEE)
        data = data[:-2] + junk + data[-2:]
        assert "adobe" not in pillow(data).info
        found = decode_image(data).astype(int)
        assert np.abs(found - (255, 0, 0)).max() <= 2
        expected = Image.fromarray(255 - np.asarray(pillow(data)), mode="CMYK").convert("RGB")
        assert np.array_equal(found, np.asarray(expected))

    def test_with_adobes_marker_ink_is_stored_inverted(self) -> None:
        data = file_of(Image.new("CMYK", (32, 32), (0, 255, 255, 0)), "JPEG", quality=100)
        for junk in (b"", b"\0" * 9):
            found = decode_image(data[:-2] + junk + data[-2:]).astype(int)
            assert np.abs(found - (255, 0, 0)).max() <= 2


class TestMissingData:
    @pytest.mark.parametrize("progressive", [False, True], ids=["baseline", "progressive"])
    @pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
    @pytest.mark.parametrize("tail", [b"", b"\xff\xd9", b"\xff\xd9" * 20], ids=["cut", "cut and ended", "many ends"])
    def test_a_cut_file_is_refused(self, progressive: bool, mode: str, tail: bytes) -> None:
        data = file_of(photo(120, 160, mode), "JPEG", quality=90, progressive=progressive)
        for share in (0.3, 0.5, 0.9):
            with pytest.raises(InvalidImage, match=r"truncated JPEG|broken JPEG|damaged JPEG"):
                decode_image(data[: int(len(data) * share)] + tail)

    def test_pillow_alone_would_return_half_of_it(self) -> None:
        """Why libjpeg-turbo's word counts: the very same bytes pass Pillow's reader."""
        data = file_of(photo(120, 160), "JPEG", quality=90)
        cut = data[: len(data) // 2] + b"\xff\xd9"
        below = pillow_rgb(cut)[100:]
        assert int(below.max()) - int(below.min()) < 30
        with pytest.raises(InvalidImage, match="truncated JPEG"):
            decode_image(cut)

    def test_a_progressive_file_that_ends_between_scans_is_refused(self) -> None:
        data = file_of(photo(120, 160), "JPEG", quality=90, progressive=True)
        last_scan = data.rindex(b"\xff\xc4")  # its Huffman table comes first
        simplejpeg.decode_jpeg(data[:last_scan] + b"\xff\xd9", strict=True)  # libjpeg-turbo alone is content
        with pytest.raises(InvalidImage, match="truncated JPEG"):
            decode_image(data[:last_scan])

    @pytest.mark.parametrize("missing", [1, 2])
    def test_lacking_only_the_end_marker_is_whole(self, missing: int) -> None:
        data = file_of(photo(120, 160), "JPEG", quality=90)
        assert np.array_equal(decode_image(data[:-missing]), pillow_rgb(data))

    @pytest.mark.parametrize("mode", ["RGB", "L", "CMYK"])
    def test_nothing_but_the_end_marker_may_lack(self, mode: str) -> None:
        """Byte by byte: the last bytes of pixel data are as needed as the first."""
        data = file_of(photo(40, 56, mode), "JPEG", quality=90)
        for missing in range(3, 40):
            with pytest.raises(InvalidImage):
                decode_image(data[:-missing])

    def test_damaged_data_is_refused(self) -> None:
        data = bytearray(file_of(photo(120, 160), "JPEG", quality=90, restart_marker_blocks=4))
        restart = data.index(b"\xff\xd3")
        data[restart + 1] = 0xD6
        with pytest.raises(InvalidImage, match="damaged JPEG: Corrupt JPEG data"):
            decode_image(bytes(data))
        assert decode_image(bytes(data), policy=TOLERANT).shape == (120, 160, 3)

    def test_junk_before_the_end_marker_and_behind_it_is_harmless(self) -> None:
        data = file_of(photo(120, 160), "JPEG", quality=90)
        assert np.array_equal(decode_image(data[:-2] + bytes(7) + data[-2:]), pillow_rgb(data))
        assert np.array_equal(decode_image(data + b"junk" * 99), pillow_rgb(data))

    @pytest.mark.parametrize("mode", ["RGB", "CMYK"])
    def test_truncation_can_be_allowed(self, mode: str) -> None:
        data = file_of(photo(120, 160, mode), "JPEG", quality=90)
        whole, found = decode_image(data), decode_image(data[: len(data) // 2], policy=TOLERANT)
        assert np.array_equal(found[:40], whole[:40])
        assert found.shape == whole.shape and not np.array_equal(found[80:], whole[80:])
        assert ImageFile.LOAD_TRUNCATED_IMAGES is False


class TestStructure:
    def test_a_scan_bomb_is_refused(self) -> None:
        data = file_of(photo(64, 64, "L"), "JPEG", progressive=True)
        scan = data[data.rindex(b"\xff\xc4") : -2]
        assert decode_image(data[:-2] + scan * 3 + data[-2:]).shape == (64, 64, 3)
        with pytest.raises(InvalidImage, match="over 100 scans"):
            decode_image(data[:-2] + scan * 100 + data[-2:])

    def test_scan_markers_that_are_no_scans_do_not_count(self) -> None:
        data = file_of(photo(64, 64, "L"), "JPEG", progressive=True)
        expected, markers = pillow_rgb(data), b"\xff\xda\0\2" * 5000
        after_frame = data.index(b"\xff\xc4")
        comment = b"\xff\xfe" + (len(markers) + 2).to_bytes(2, "big") + markers
        assert np.array_equal(decode_image(data[:after_frame] + comment + data[after_frame:]), expected)
        assert np.array_equal(decode_image(data + b"\0\2" + markers), expected)

    def test_segments_between_scans_do_not_count(self) -> None:
        data = file_of(photo(64, 64, "L"), "JPEG", progressive=True)
        last = data.rindex(b"\xff\xc4")
        assert np.array_equal(decode_image(data[:last] + b"\xff\xfe\0\3x" * 600 + data[last:]), pillow_rgb(data))

    def test_thousands_of_segments_are_refused(self) -> None:
        data = file_of(photo(8, 8), "JPEG")
        for _ in range(600):
            data = with_segment(data, 0xE1, b"Exif\0\0a")
        with pytest.raises(InvalidImage, match="over 512 segments"):
            decode_image(data)

    def test_a_second_frame_header_is_refused(self) -> None:
        data = file_of(photo(16, 16), "JPEG")
        frame = data.index(b"\xff\xc0")
        second = bytearray(data[frame : frame + 19])
        second[5:9] = (30_000).to_bytes(2, "big") * 2
        with pytest.raises(InvalidImage):
            decode_image(data[:frame] + bytes(second) + data[frame:])

    def test_two_readers_that_see_two_sizes_are_not_trusted(self) -> None:
        data = file_of(photo(16, 24), "JPEG")
        with pytest.raises(InvalidImage, match="gives two sizes, 24x16 and 24x17"):
            read_jpeg(data, (24, 17), adobe=False, one_scan=True, allow_truncated=False)

    def test_multi_picture_file_gives_its_first(self) -> None:
        first, second = photo(40, 50, seed=1), photo(40, 50, seed=2)
        data = file_of(first, "MPO", save_all=True, append_images=[second])
        assert pillow(data).format == "MPO"
        assert np.array_equal(decode_image(data), pillow_rgb(data))
