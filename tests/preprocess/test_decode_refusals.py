"""Limits before decoding, and nothing but InvalidImage for whatever comes."""

import io
import struct
import subprocess
import sys
import threading
import warnings
import zlib
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageFile

from encoder.errors import InvalidImage, InvalidInput
from encoder.preprocess.decode import DecodeLimits, DecodePolicy, check_pixels, decode_image
from tests.preprocess.pictures import file_of, photo, pillow_rgb, png_chunk, png_file

pytestmark = pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
TOLERANT = DecodePolicy(allow_truncated=True)


def _headers(width: int, height: int) -> dict[str, bytes]:
    """Small files whose headers claim a size."""
    jpeg = bytearray(file_of(photo(8, 8), "JPEG"))
    frame = jpeg.index(b"\xff\xc0")
    jpeg[frame + 5 : frame + 9] = struct.pack(">HH", height, width)
    gif = bytearray(file_of(photo(8, 8, "P"), "GIF"))
    frame = gif.index(b",\0\0\0\0\x08\0\x08\0")
    gif[6:10] = gif[frame + 5 : frame + 9] = struct.pack("<HH", width, height)
    bmp = bytearray(file_of(photo(8, 8), "BMP"))
    bmp[18:26] = struct.pack("<ii", width, height)
    tiff = file_of(photo(8, 8), "TIFF")
    for tag, side in ((256, width), (257, height)):
        tiff = tiff.replace(struct.pack("<HHIHH", tag, 3, 1, 8, 0), struct.pack("<HHII", tag, 4, 1, side))
        tiff = tiff.replace(struct.pack("<HHII", tag, 4, 1, 8), struct.pack("<HHII", tag, 4, 1, side))
    canvas = max(width - 1, 0).to_bytes(3, "little") + max(height - 1, 0).to_bytes(3, "little")
    webp = b"WEBPVP8X" + struct.pack("<I", 10) + bytes(4) + canvas
    return {
        "PNG": png_file(width, height, 8, 2, b""),
        "JPEG": bytes(jpeg),
        "GIF": bytes(gif),
        "BMP": bytes(bmp),
        "TIFF": tiff,
        "WEBP": b"RIFF" + struct.pack("<I", len(webp)) + webp,
    }


class TestLimits:
    @pytest.mark.parametrize("name", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
    @pytest.mark.parametrize("size", [(60_000, 60_000), (12_000, 9_000), (33_000, 2)])
    def test_are_read_from_the_header(self, name: str, size: tuple[int, int]) -> None:
        with pytest.raises(InvalidImage, match=r"over the limit of (64000000 pixels|32768)") as caught:
            decode_image(_headers(*size)[name])
        seen = str(caught.value)
        assert f"{size[0]}x{size[1]}" in seen or f"{size[0] * size[1]} pixels" in seen

    def test_hold_up_to_the_last_pixel(self) -> None:
        data = file_of(photo(30, 40), "PNG")
        assert decode_image(data, DecodeLimits(max_pixels=1200, max_side=40, max_bytes=len(data))).shape == (30, 40, 3)
        for limits in (
            DecodeLimits(max_pixels=1199),
            DecodeLimits(max_side=39),
            DecodeLimits(max_bytes=len(data) - 1),
        ):
            with pytest.raises(InvalidImage, match="over the limit of"):
                decode_image(data, limits)

    def test_hold_for_tiles(self) -> None:
        """400 KB that unpack to a tile of 400 MB for a picture of 16x16."""
        entries = {256: 16, 257: 16, 258: 8, 259: 8, 262: 1, 277: 1, 322: 20_000, 323: 20_000, 324: 0, 325: 0}
        packed = zlib.compress(bytes(1 << 20))
        entries[324], entries[325] = 8 + 2 + 12 * len(entries) + 4, len(packed)
        tags = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in entries.items())
        data = b"II*\0" + struct.pack("<IH", 8, len(entries)) + tags + bytes(4) + packed
        with pytest.raises(InvalidImage, match="a tile of the TIFF is 20000x20000: over the limit of 64000000 pixels"):
            decode_image(data)

    @pytest.mark.parametrize("values", [{"max_pixels": 0}, {"max_side": -1}, {"max_bytes": 0}, {"max_pixels": 10**9}])
    def test_that_cannot_hold_are_refused(self, values: dict[str, int]) -> None:
        with pytest.raises(InvalidInput, match="decode limits"):
            DecodeLimits(**values)


class TestPolicy:
    def test_describes_all_that_changes_pixels(self) -> None:
        plain = DecodePolicy().describe()
        assert plain["version"] == 2
        for other in (
            DecodePolicy(apply_exif_orientation=False),
            DecodePolicy(background=(0, 0, 0)),
            DecodePolicy(allow_truncated=True),
        ):
            assert other.describe() != plain

    @pytest.mark.parametrize("background", [(0, 0), (0, 0, 256), (-1, 0, 0)])
    def test_refuses_what_is_no_colour(self, background: tuple[int, ...]) -> None:
        with pytest.raises(InvalidInput, match="background"):
            DecodePolicy(background=background)  # type: ignore[arg-type]


KINDS = [
    ("PNG", "RGB", {}),
    ("PNG", "P", {}),
    ("PNG", "RGBA", {}),
    ("GIF", "P", {"interlace": False}),
    ("WEBP", "RGB", {}),
    ("BMP", "RGB", {}),
    ("TIFF", "RGB", {}),
    ("TIFF", "RGB", {"compression": "tiff_lzw"}),
    ("TIFF", "RGB", {"compression": "jpeg"}),
    ("AVIF", "RGB", {}),
    ("JPEG", "RGB", {}),
    ("JPEG", "CMYK", {"progressive": True}),
]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("name", "mode", "options"), KINDS)
@pytest.mark.parametrize("share", [0.95, 0.6, 0.3, 0.1])
def test_truncated_files_are_refused(name: str, mode: str, options: dict, share: float) -> None:
    data = file_of(photo(100, 130, mode), name, **options)
    with pytest.raises(InvalidImage) as caught:
        decode_image(data[: int(len(data) * share)])
    message = str(caught.value)
    assert name in message.upper() and "; send" in message
    assert "\n" not in message and "0x" not in message


@pytest.mark.parametrize(("name", "mode", "options"), [KINDS[0], KINDS[2], KINDS[3], KINDS[5], KINDS[6]])
def test_truncation_can_be_allowed(name: str, mode: str, options: dict) -> None:
    data = file_of(photo(100, 130, mode), name, **options)
    whole, found = decode_image(data), decode_image(data[: int(len(data) * 0.6)], policy=TOLERANT)
    assert found.shape == whole.shape
    rows = slice(60, 100) if name == "BMP" else slice(0, 40)  # BMP is stored from below
    assert np.array_equal(found[rows], whole[rows])
    assert not np.array_equal(found, whole)


@pytest.mark.parametrize("broken", [b"IHDR", b"IDAT"])
def test_broken_checksums_are_refused(broken: bytes) -> None:
    data = bytearray(file_of(photo(20, 20), "PNG"))
    at = data.index(broken)
    data[at + 5] ^= 0xFF
    with pytest.raises(InvalidImage, match=r"broken PNG: .*; send the whole, undamaged file"):
        decode_image(bytes(data))


@pytest.mark.parametrize("name", ["PNG", "JPEG", "GIF", "BMP", "TIFF", "WEBP"])
def test_a_header_without_pixels_is_refused(name: str) -> None:
    with pytest.raises(InvalidImage):
        decode_image(_headers(0, 5)[name])


SMALL_FILES = [file_of(photo(12, 17, mode), name, **options) for name, mode, options in KINDS] + [
    file_of(photo(12, 17), "JPEG", progressive=True),
    file_of(photo(12, 17), "MPO", save_all=True, append_images=[photo(12, 17)]),
    png_file(4, 1, 16, 0, bytes(9), png_chunk(b"tRNS", b"\0\0"), png_chunk(b"eXIf", b"II*\0")),
]
LIMITS = DecodeLimits(max_pixels=100_000, max_side=2_000)


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    which=st.integers(0, len(SMALL_FILES) - 1),
    edits=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), max_size=6),
    cut=st.integers(0, 10**6),
    extra=st.binary(max_size=8),
    tolerant=st.booleans(),
)
@example(which=0, edits=[], cut=0, extra=b"", tolerant=False)
def test_whatever_comes_gives_pixels_or_invalid_image(
    which: int, edits: list[tuple[int, int]], cut: int, extra: bytes, tolerant: bool
) -> None:
    data = bytearray(SMALL_FILES[which])
    for at, value in edits:
        data[at % len(data)] = value
    content = bytes(data[: len(data) - cut % len(data)]) + extra
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = decode_image(content, LIMITS, TOLERANT if tolerant else DecodePolicy())
    except InvalidImage as error:
        assert "\n" not in str(error) and len(str(error)) < 400
    else:
        assert found.dtype == np.uint8 and found.ndim == 3 and found.shape[2] == 3
        assert found.flags.c_contiguous and found.flags.writeable


@pytest.mark.parametrize(
    "error", [MemoryError(), struct.error("x"), RecursionError("deep"), SystemError(""), KeyError(3)]
)
def test_what_a_reader_raises_becomes_invalid_image(monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    data = file_of(photo(8, 8), "PNG")
    monkeypatch.setattr(ImageFile.ImageFile, "load", fail)
    with pytest.raises(InvalidImage, match="broken PNG: ") as caught:
        decode_image(data)
    assert caught.value.__cause__ is error


def test_a_bomb_warning_that_is_an_error_does_not_escape() -> None:
    limits = DecodeLimits(max_pixels=170_000_000)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(InvalidImage):
            decode_image(_headers(12_000, 9_000)["PNG"], limits)


def test_threads_do_not_disturb_each_other() -> None:
    files = [file_of(photo(64 + n, 80 - n, mode, seed=n), name) for n, (name, mode, _) in enumerate(KINDS)] * 6
    cut = file_of(photo(90, 90), "PNG")[:4000]
    expected = [decode_image(data) for data in files]
    start = threading.Barrier(8)

    def work(number: int) -> list[np.ndarray]:
        start.wait()
        if number % 2:  # half of the threads allow truncation meanwhile, which must stay theirs
            for _ in range(20):
                decode_image(cut, policy=TOLERANT)
            return expected
        for _ in range(20):
            with pytest.raises(InvalidImage):
                decode_image(cut)
        return [decode_image(data) for data in files]

    with ThreadPoolExecutor(8) as pool:
        for found in pool.map(work, range(8)):
            assert all(np.array_equal(one, other) for one, other in zip(found, expected, strict=True))


def test_pillows_settings_stay_as_they_are() -> None:
    before = (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)
    data = file_of(photo(90, 90), "PNG")
    decode_image(data[:4000], DecodeLimits(max_pixels=170_000_000), TOLERANT)
    assert before == (Image.MAX_IMAGE_PIXELS, ImageFile.LOAD_TRUNCATED_IMAGES)


def test_decoding_needs_no_torch() -> None:
    code = (
        "import sys, encoder.preprocess.decode as d; d.decode_image(sys.stdin.buffer.read());"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers', 'ray')))"
    )
    done = subprocess.run([sys.executable, "-c", code], input=file_of(photo(9, 9), "JPEG"), timeout=60)
    assert done.returncode == 0


class TestRawPixels:
    def test_rgb_is_taken_as_it_is(self) -> None:
        pixels = np.asarray(photo(13, 17))
        found = check_pixels(pixels.tobytes(), 13, 17, 3)
        assert np.array_equal(found, pixels) and found.flags.writeable and found.flags.c_contiguous

    def test_grey_is_repeated(self) -> None:
        grey = np.asarray(photo(13, 17, "L"))
        assert np.array_equal(check_pixels(memoryview(grey.tobytes()), 13, 17, 1), np.stack([grey] * 3, axis=2))

    @pytest.mark.parametrize("background", [(255, 255, 255), (9, 99, 199)])
    def test_alpha_gives_what_the_same_pixels_in_a_file_give(self, background: tuple[int, int, int]) -> None:
        image = photo(13, 17).convert("RGBA")
        image.putalpha(photo(13, 17, "L", seed=4))
        policy = DecodePolicy(background=background)
        found = check_pixels(image.tobytes(), 13, 17, 4, policy=policy)
        assert np.array_equal(found, decode_image(file_of(image, "PNG"), policy=policy))
        assert not np.array_equal(found, pillow_rgb(file_of(image, "PNG")))

    @pytest.mark.parametrize(
        ("length", "height", "width", "channels", "reason"),
        [
            (11, 2, 2, 3, "take 12 bytes, 11 came"),
            (13, 2, 2, 3, "take 12 bytes, 13 came"),
            (8, 2, 2, 2, "2 channels"),
            (0, 0, 2, 3, "no pixels"),
            (0, 2, 0, 3, "no pixels"),
            (0, 1 << 31, 1 << 31, 4, "over the limit of 32768"),
            (0, 30_000, 30_000, 3, "over the limit of 64000000"),
        ],
    )
    def test_wrong_ones_are_refused(self, length: int, height: int, width: int, channels: int, reason: str) -> None:
        with pytest.raises(InvalidImage, match=reason):
            check_pixels(bytes(length), height, width, channels)


def test_image_open_is_told_the_format(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pillow's other readers (EPS runs Ghostscript) never get to see a byte."""
    asked: list[tuple[str, ...]] = []
    real = Image.open

    def spy(fp: io.BytesIO, mode: str = "r", formats: tuple[str, ...] = ()) -> Image.Image:
        asked.append(tuple(formats))
        return real(fp, mode, formats)

    monkeypatch.setattr(Image, "open", spy)
    for name in ("JPEG", "PNG", "GIF"):
        decode_image(file_of(photo(8, 8), name))
    with pytest.raises(InvalidImage, match="not a supported picture"):
        decode_image(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n")
    assert asked == [("JPEG",), ("PNG",), ("GIF",)]
