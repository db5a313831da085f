"""Orientation, transparency, depth, palettes and animation, each against Pillow or transformers."""

import io
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms, ImageOps
from transformers.image_transforms import convert_to_rgb

from encoder.errors import InvalidImage
from encoder.preprocess.decode import DecodeLimits, DecodePolicy, decode_image
from tests.preprocess.pictures import file_of, photo, pillow, pillow_rgb, png_chunk, png_file, with_segment

pytestmark = pytest.mark.filterwarnings("ignore:Corrupt EXIF")
AS_STORED = DecodePolicy(apply_exif_orientation=False)
GREEN = DecodePolicy(background=(10, 200, 30))
# How a picture that is upright gets stored for each orientation.
STORED_AS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}


def _exif(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


@pytest.mark.parametrize(
    ("name", "mode"),
    [(name, mode) for name in ("PNG", "BMP", "TIFF", "GIF") for mode in ("RGB", "L", "1", "P")] + [("WEBP", "RGB")],
)
@pytest.mark.parametrize("size", [(1, 1), (1, 2000), (2000, 1), (33, 57)])
def test_lossless_files_equal_pillow(name: str, mode: str, size: tuple[int, int]) -> None:
    image = photo(*size).convert(mode)
    data = file_of(image, name, **({"lossless": True} if name == "WEBP" else {}))
    found = decode_image(data)
    assert found.shape == (*size, 3) and found.dtype == np.uint8
    assert found.flags.c_contiguous and found.flags.writeable
    assert np.array_equal(found, pillow_rgb(data))
    if name != "GIF" or mode in {"L", "1", "P"}:
        assert np.array_equal(found, np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("name", ["AVIF", "WEBP"])
def test_lossy_files_equal_pillow(name: str) -> None:
    data = file_of(photo(75, 91), name, quality=60)
    assert np.array_equal(decode_image(data), pillow_rgb(data))


@pytest.mark.parametrize(
    ("mode", "compression"),
    [
        ("RGB", None),
        ("RGB", "tiff_lzw"),
        ("RGB", "tiff_adobe_deflate"),
        ("1", "group4"),
        ("CMYK", None),
        ("YCbCr", None),
    ],
)
def test_tiff_kinds_equal_pillow(mode: str, compression: str | None) -> None:
    data = file_of(photo(40, 61, mode), "TIFF", compression=compression)
    assert np.array_equal(decode_image(data), pillow_rgb(data))


class TestOrientation:
    @pytest.mark.parametrize("orientation", range(1, 9))
    @pytest.mark.parametrize("name", ["PNG", "TIFF", "WEBP"])
    def test_a_lossless_picture_comes_out_upright(self, name: str, orientation: int) -> None:
        upright = photo(20, 31)
        stored = upright.transpose(STORED_AS[orientation]) if orientation > 1 else upright
        options = {"lossless": True} if name == "WEBP" else {}
        data = file_of(stored, name, exif=_exif(orientation), **options)
        assert np.array_equal(decode_image(data), np.asarray(upright))
        assert np.array_equal(decode_image(data, policy=AS_STORED), np.asarray(stored))

    @pytest.mark.parametrize("orientation", range(1, 9))
    @pytest.mark.parametrize("name", ["JPEG", "AVIF"])
    def test_equals_pillows_transpose(self, name: str, orientation: int) -> None:
        data = file_of(photo(20, 31), name, exif=_exif(orientation))
        expected = ImageOps.exif_transpose(pillow(data))
        found = decode_image(data)
        assert found.shape == ((20, 31, 3) if orientation < 5 else (31, 20, 3))
        assert np.array_equal(found, np.asarray(expected.convert("RGB")))
        assert found.flags.c_contiguous
        assert np.array_equal(decode_image(data, policy=AS_STORED), pillow_rgb(data))

    def test_from_xmp(self) -> None:
        xmp = b'http://ns.adobe.com/xap/1.0/\0<rdf:Description tiff:Orientation="6"/>'
        data = with_segment(file_of(photo(20, 31), "JPEG"), 0xE1, xmp)
        assert np.array_equal(decode_image(data), np.rot90(pillow_rgb(data), -1))

    @pytest.mark.parametrize("orientation", [0, 9, 77])
    def test_that_does_not_exist_counts_as_upright(self, orientation: int) -> None:
        data = file_of(photo(20, 31), "JPEG", exif=_exif(orientation))
        assert np.array_equal(decode_image(data), pillow_rgb(data))

    @pytest.mark.parametrize("body", [b"", b"II", b"junkjunk", b"II*\0\xff\xff\xff\x7f", b"MM\0*\0\0\0\x08\xff\xff"])
    def test_in_broken_exif_counts_as_upright(self, body: bytes) -> None:
        data = with_segment(file_of(photo(20, 31), "JPEG"), 0xE1, b"Exif\0\0" + body)
        assert np.array_equal(decode_image(data), pillow_rgb(file_of(photo(20, 31), "JPEG")))


class TestTransparency:
    @pytest.mark.parametrize(("name", "mode"), [("PNG", "RGBA"), ("PNG", "LA"), ("WEBP", "RGBA"), ("TIFF", "RGBA")])
    def test_alpha_is_composited_on_white_as_transformers_does(self, name: str, mode: str) -> None:
        image = photo(40, 64).convert(mode)
        image.putalpha(Image.fromarray(np.arange(40 * 64, dtype=np.uint16).reshape(40, 64).astype(np.uint8)))
        data = file_of(image, name, **({"lossless": True, "exact": True} if name == "WEBP" else {}))
        assert np.array_equal(decode_image(data), convert_to_rgb(pillow(data), return_numpy=True))

    def test_on_another_background(self) -> None:
        image = Image.new("RGBA", (3, 1), (0, 0, 0, 255))
        image.putpixel((1, 0), (255, 0, 255, 0))
        image.putpixel((2, 0), (210, 0, 230, 128))
        found = decode_image(file_of(image, "PNG"), policy=GREEN)
        half = [
            round(top * 128 / 255 + below * 127 / 255) for top, below in zip((210, 0, 230), (10, 200, 30), strict=True)
        ]
        assert found[0, 0].tolist() == [0, 0, 0]
        assert found[0, 1].tolist() == [10, 200, 30]
        assert np.abs(found[0, 2].astype(int) - half).max() <= 1

    def test_colour_hidden_under_alpha_0_never_shows(self) -> None:
        image = Image.new("RGBA", (8, 8), (255, 0, 0, 0))
        assert (decode_image(file_of(image, "PNG")) == 255).all()

    def test_transparent_palette_entry(self) -> None:
        image = Image.new("P", (2, 1))
        image.putpalette([255, 0, 0, 0, 0, 255])
        image.putpixel((1, 0), 1)
        for name in ("PNG", "GIF"):
            found = decode_image(file_of(image, name, transparency=1), policy=GREEN)
            assert found.tolist() == [[[255, 0, 0], [10, 200, 30]]], name

    def test_palette_with_an_alpha_for_each_entry(self) -> None:
        image = Image.new("P", (2, 1))
        image.putpalette([255, 0, 0, 0, 0, 255])
        image.putpixel((1, 0), 1)
        data = file_of(image, "PNG", transparency=bytes([100, 0]))
        assert np.array_equal(decode_image(data), convert_to_rgb(pillow(data), return_numpy=True))
        assert decode_image(data)[0, 1].tolist() == [255, 255, 255]

    @pytest.mark.parametrize(
        ("depth", "colour_type", "rows", "colour"),
        [
            (1, 0, bytes([0, 0b0111_1111]), b"\0\0"),
            (2, 0, bytes([0, 0b10_11_00_01, 0b11_11_11_11]), b"\0\x02"),
            (4, 0, bytes([0, 0x9F, 0xAF, 0x8F, 0xFF]), b"\0\x09"),
            (8, 0, bytes([0, 77, 78, 76, 0, 9, 9, 9, 9]), b"\0\x4d"),
            (16, 0, bytes([0, 0x12, 0x34, 0x12, 0x35, *range(12)]), b"\x12\x34"),
            (8, 2, bytes([0, 1, 2, 3, 1, 2, 4, *([9] * 18)]), b"\0\1\0\2\0\3"),
            (16, 2, bytes([0, 1, 0, 2, 0, 3, 0, 9, 0, 2, 0, 3, 0, *([9] * 36)]), b"\1\0\2\0\3\0"),
        ],
    )
    def test_transparent_colour_at_every_depth(self, depth: int, colour_type: int, rows: bytes, colour: bytes) -> None:
        """The first pixel has the transparent colour, the others have not."""
        data = png_file(8, 1, depth, colour_type, rows, png_chunk(b"tRNS", colour))
        plain = png_file(8, 1, depth, colour_type, rows)
        found, opaque = decode_image(data, policy=GREEN), decode_image(plain)
        assert found[0, 0].tolist() == [10, 200, 30] != opaque[0, 0].tolist()
        assert np.array_equal(found[0, 1:], opaque[0, 1:])


class TestDepth:
    levels = np.array([[0, 255, 256, 32767, 32768, 65279, 65535]], dtype=np.uint16)
    high = (0, 0, 1, 127, 128, 254, 255)

    @pytest.mark.parametrize(("name", "mode"), [("PNG", "I;16"), ("TIFF", "I;16"), ("TIFF", "I;16B"), ("TIFF", "I")])
    def test_16_bit_grey_is_scaled(self, name: str, mode: str) -> None:
        kind = {"I;16": "<u2", "I;16B": ">u2", "I": "<i4"}[mode]
        image = Image.frombytes(mode, (7, 1), self.levels.astype(kind).tobytes())
        found = decode_image(file_of(image, name))
        assert found[0].tolist() == [[level] * 3 for level in self.high]

    def test_16_bit_grey_equals_the_same_picture_saved_as_colour(self) -> None:
        grey = b"\0" + self.levels.astype(">u2").tobytes()
        colour = b"\0" + np.repeat(self.levels.astype(">u2"), 3).tobytes()
        assert np.array_equal(decode_image(png_file(7, 1, 16, 0, grey)), decode_image(png_file(7, 1, 16, 2, colour)))

    def test_16_bit_grey_with_alpha(self) -> None:
        samples = np.stack([self.levels, np.array([[65535, 65535, 65535, 65535, 0, 65535, 65535]])], axis=-1)
        found = decode_image(png_file(7, 1, 16, 4, b"\0" + samples.astype(">u2").tobytes()), policy=GREEN)
        expected = [[level] * 3 for level in self.high]
        expected[4] = [10, 200, 30]
        assert found[0].tolist() == expected

    def test_wider_integers_have_no_white(self) -> None:
        image = Image.fromarray(np.array([[0, 70000]], dtype=np.int32))
        with pytest.raises(InvalidImage, match="beyond 16 bits"):
            decode_image(file_of(image, "TIFF"))

    def test_floats_have_no_white(self) -> None:
        image = Image.fromarray(np.array([[0.0, 1.0]], dtype=np.float32))
        with pytest.raises(InvalidImage, match="floating point"):
            decode_image(file_of(image, "TIFF"))


@pytest.mark.parametrize("name", ["GIF", "PNG", "WEBP", "AVIF", "TIFF"])
def test_the_first_frame_of_an_animation(name: str) -> None:
    frames = [Image.new("RGB", (30, 20), colour) for colour in ((250, 0, 0), (0, 250, 0), (0, 0, 250))]
    data = file_of(frames[0], name, save_all=True, append_images=frames[1:])
    assert Image.open(io.BytesIO(data)).n_frames == 3
    found = decode_image(data)
    assert found.shape == (20, 30, 3)
    assert np.abs(found.astype(int) - (250, 0, 0)).max() <= 3


def test_colour_profiles_are_ignored() -> None:
    image = photo(20, 31)
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("XYZ")).tobytes()
    assert np.array_equal(decode_image(file_of(image, "PNG", icc_profile=profile)), np.asarray(image))


@pytest.mark.parametrize("kind", [b"zTXt", b"iCCP", b"iTXt", b"tEXt"])
def test_huge_texts_do_not_cost_a_png_its_pixels(kind: bytes) -> None:
    packed = zlib.compress(bytes(3_000_000))
    body = {
        b"zTXt": b"key\0\0" + packed,
        b"iCCP": b"key\0\0" + packed,
        b"iTXt": b"key\0\1\0\0\0" + packed,
        b"tEXt": b"key\0" + b"a" * 3_000_000,
    }[kind]
    chunks = [png_chunk(kind, body)] * (30 if kind == b"tEXt" else 1)
    data = png_file(4, 1, 8, 0, bytes([0, 1, 2, 3, 4]), *chunks)
    with pytest.raises(ValueError, match="MAX_TEXT"):
        pillow(data)
    found = decode_image(data, DecodeLimits(max_bytes=200_000_000))
    assert found[0, :, 0].tolist() == [1, 2, 3, 4]
