"""The kinds within each format, made by hand where Pillow writes none, each against Pillow's own reader."""

import io
import struct
import zlib

import numpy as np
import pytest
from PIL import Image, ImageCms

from encoder.errors import InvalidImage
from encoder.preprocess.decode import DecodePolicy, decode_image
from tests.preprocess.pictures import file_of, photo, pillow, pillow_rgb, png_chunk, png_file, tiff_file

GREEN = DecodePolicy(background=(10, 200, 30))


class TestJpeg:
    @pytest.mark.parametrize(
        ("marker", "bits", "told"),
        [
            (0xC1, 12, "12 bits a sample"),
            (0xC0, 16, "16 bits a sample"),
            (0xC3, 8, "lossless"),
            (0xC5, 8, "hierarchical"),
            (0xCB, 8, "lossless"),
            (0xF7, 8, "JPEG-LS"),
        ],
    )
    def test_kinds_that_nobody_decodes_are_named(self, marker: int, bits: int, told: str) -> None:
        data = bytearray(file_of(photo(32, 48), "JPEG"))
        frame = data.index(b"\xff\xc0")
        data[frame + 1], data[frame + 4] = marker, bits
        with pytest.raises(InvalidImage, match=f"{told}, which is not supported; save it"):
            decode_image(bytes(data))

    def test_arithmetic_coding_equals_pillow(self) -> None:
        """Huffman data read as arithmetic data is noise, and the same noise in both readers."""
        data = bytearray(file_of(photo(64, 64), "JPEG"))
        data[data.index(b"\xff\xc0") + 1] = 0xC9
        found = decode_image(bytes(data))
        assert np.array_equal(found, pillow_rgb(bytes(data)))

    def test_extended_sequential_equals_pillow(self) -> None:
        data = bytearray(file_of(photo(33, 47), "JPEG"))
        data[data.index(b"\xff\xc0") + 1] = 0xC1
        assert np.array_equal(decode_image(bytes(data)), pillow_rgb(file_of(photo(33, 47), "JPEG")))


class TestPng:
    @pytest.mark.parametrize("depth", [1, 2, 4, 8])
    @pytest.mark.parametrize("width", [1, 5, 8, 13])
    def test_grey_at_every_depth(self, depth: int, width: int) -> None:
        levels = np.arange(width) * 7 % (1 << depth)
        bits = "".join(f"{level:0{depth}b}" for level in levels)
        packed = int(bits.ljust(-(-len(bits) // 8) * 8, "0"), 2).to_bytes(-(-len(bits) // 8), "big")
        data = png_file(width, 1, depth, 0, b"\0" + packed)
        expected = levels * 255 // ((1 << depth) - 1)
        assert decode_image(data)[0].tolist() == [[level] * 3 for level in expected]
        assert np.array_equal(decode_image(data), pillow_rgb(data))

    @pytest.mark.parametrize("depth", [1, 2, 4, 8])
    def test_palettes_at_every_depth_with_an_alpha_for_some(self, depth: int) -> None:
        colours = [(255, 0, 0), (0, 0, 255)]
        row = bytes([0, 0b0100_0000, 0]) if depth == 1 else bytes([0, *(1 << (8 - depth * 2) % 8,) * 9])
        chunks = [png_chunk(b"PLTE", bytes(sum(colours, ()))), png_chunk(b"tRNS", b"\xff\0")]
        data = png_file(2, 1, depth, 3, row[:2] if depth < 8 else bytes([0, 0, 1]), *chunks)
        assert decode_image(data, policy=GREEN)[0].tolist() == [[255, 0, 0], [10, 200, 30]]

    @pytest.mark.parametrize(("colour_type", "samples"), [(2, 3), (4, 2), (6, 4)])
    def test_16_bit_colour_and_alpha_keep_the_high_byte(self, colour_type: int, samples: int) -> None:
        values = np.random.default_rng(3).integers(0, 65536, (9, 7, samples))
        if colour_type in {4, 6}:
            values[..., -1] = 65535
        rows = b"".join(b"\0" + row.astype(">u2").tobytes() for row in values)
        found = decode_image(png_file(7, 9, 16, colour_type, rows))
        colours = values[..., :1].repeat(3, axis=2) if colour_type == 4 else values[..., :3]
        assert np.array_equal(found, (colours >> 8).astype(np.uint8))

    @pytest.mark.parametrize("size", [(1, 1), (1, 9), (9, 1), (4, 4), (8, 8), (33, 21)])
    def test_interlaced_equals_plain(self, size: tuple[int, int]) -> None:
        pixels = np.asarray(photo(*size))
        passes = [(0, 0, 8, 8), (0, 4, 8, 8), (4, 0, 8, 4), (0, 2, 4, 4), (2, 0, 4, 2), (0, 1, 2, 2), (1, 0, 2, 1)]
        rows = b"".join(
            b"\0" + row.tobytes()
            for top, left, down, right in passes
            for row in pixels[top::down, left::right]
            if row.size
        )
        header = struct.pack(">IIBBBBB", size[1], size[0], 8, 2, 0, 0, 1)
        body = png_chunk(b"IHDR", header) + png_chunk(b"IDAT", zlib.compress(rows)) + png_chunk(b"IEND", b"")
        assert np.array_equal(decode_image(b"\x89PNG\r\n\x1a\n" + body), pixels)

    def test_apng_whose_default_image_is_no_frame(self) -> None:
        """What a viewer without animation shows: the default image."""
        still, frame = photo(12, 17, seed=1), photo(12, 17, seed=2)
        data = file_of(still, "PNG", save_all=True, append_images=[frame, photo(12, 17, seed=3)], default_image=True)
        assert pillow(data).n_frames > 1
        assert np.array_equal(decode_image(data), np.asarray(still))


class TestGif:
    def test_a_first_frame_that_fills_a_part(self) -> None:
        data = bytearray(file_of(photo(20, 30, "P"), "GIF"))
        data[6:10] = struct.pack("<HH", 50, 40)  # the canvas
        found = decode_image(bytes(data))
        assert found.shape == (40, 50, 3)
        assert np.array_equal(found, pillow_rgb(bytes(data)))
        assert np.array_equal(found[:20, :30], decode_image(file_of(photo(20, 30, "P"), "GIF")))

    def test_a_transparent_animation_gives_its_first_frame_on_the_background(self) -> None:
        frames = []
        for n in range(3):
            frame = Image.new("RGBA", (30, 20), (0, 0, 0, 0))
            frame.paste((250, 10 * n, 0, 255), (5 * n, 0, 5 * n + 5, 20))
            frames.append(frame)
        data = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:], disposal=2)
        found = decode_image(data, policy=GREEN)
        assert found[3, 2].tolist() == [250, 0, 0] and found[3, 7].tolist() == [10, 200, 30]

    def test_thousands_of_frames_cost_no_more_than_one(self) -> None:
        frames = [Image.new("L", (4, 4), n % 256) for n in range(3000)]
        data = file_of(frames[0], "GIF", save_all=True, append_images=frames[1:])
        assert np.array_equal(decode_image(data), np.zeros((4, 4, 3)))


class TestWebp:
    @pytest.mark.parametrize("options", [{"lossless": True}, {"quality": 70}])
    @pytest.mark.parametrize("mode", ["RGB", "RGBA"])
    def test_lossy_and_lossless_with_and_without_alpha(self, mode: str, options: dict[str, object]) -> None:
        image = photo(37, 53).convert(mode)
        if mode == "RGBA":
            image.putalpha(photo(37, 53, "L", seed=4))
        data = file_of(image, "WEBP", **options)
        ground = Image.new("RGBA", image.size, (10, 200, 30, 255))
        expected = Image.alpha_composite(ground, pillow(data).convert("RGBA")).convert("RGB")
        assert np.array_equal(decode_image(data, policy=GREEN), np.asarray(expected))


class TestBmp:
    @pytest.mark.parametrize("mode", ["1", "L", "P", "RGB", "RGBA"])
    def test_kinds_that_pillow_writes(self, mode: str) -> None:
        data = file_of(photo(13, 21).convert(mode), "BMP")
        assert np.array_equal(decode_image(data), pillow_rgb(data))

    def test_from_the_top_down(self) -> None:
        data = bytearray(file_of(photo(13, 20), "BMP"))
        data[22:26] = struct.pack("<i", -13)
        assert np.array_equal(decode_image(bytes(data)), np.asarray(photo(13, 20))[::-1])

    def test_run_length_coded(self) -> None:
        """Two rows of 8-bit indices: four of colour 1; then two of colour 0 and two of colour 1."""
        runs = bytes([4, 1, 0, 0, 2, 0, 2, 1, 0, 0, 0, 1])
        palette = bytes([0, 0, 255, 0, 255, 0, 0, 0])  # red, blue, stored as blue, green, red, 0
        info = struct.pack("<IiiHHIIiiII", 40, 4, 2, 1, 8, 1, len(runs), 0, 0, 2, 0)
        offset = 14 + len(info) + len(palette)
        data = b"BM" + struct.pack("<IHHI", offset + len(runs), 0, 0, offset) + info + palette + runs
        red, blue = [255, 0, 0], [0, 0, 255]
        assert decode_image(data).tolist() == [[red, red, blue, blue], [blue] * 4]

    def test_16_bits_a_pixel(self) -> None:
        info = struct.pack("<IiiHHIIiiII", 40, 2, 1, 1, 16, 0, 4, 0, 0, 0, 0)
        data = b"BM" + struct.pack("<IHHI", 58, 0, 0, 54) + info + struct.pack("<HH", 31 << 10, 31)
        assert decode_image(data).tolist() == [[[255, 0, 0], [0, 0, 255]]]


class TestTiff:
    pixels = np.asarray(photo(32, 48))
    rgb: dict[int, tuple[int, int | list[int]]] = {  # noqa: RUF012
        256: (4, 48), 257: (4, 32), 258: (3, [8, 8, 8]), 259: (3, 1), 262: (3, 2), 277: (3, 3),
    }  # fmt: skip

    @pytest.mark.parametrize("order", ["<", ">"], ids=["little", "big"])
    def test_either_byte_order(self, order: str) -> None:
        data = tiff_file({**self.rgb, 278: (4, 32), 279: (4, self.pixels.nbytes)}, self.pixels.tobytes(), order)
        assert np.array_equal(decode_image(data), self.pixels)
        assert np.array_equal(decode_image(data), pillow_rgb(data))

    def test_one_tile(self) -> None:
        tile = np.zeros((32, 48, 3), np.uint8)
        tile[:] = self.pixels
        data = tiff_file({**self.rgb, 322: (4, 48), 323: (4, 32), 325: (4, tile.nbytes)}, tile.tobytes())
        assert np.array_equal(decode_image(data), self.pixels)

    @pytest.mark.parametrize(
        ("mode", "compression"),
        [
            ("RGB", "jpeg"), ("L", "jpeg"), ("RGB", "packbits"), ("L", "tiff_lzw"), ("RGBA", "tiff_lzw"),
            ("P", "tiff_deflate"), ("CMYK", "tiff_lzw"), ("1", "group3"), ("LA", None), ("RGB", "zstd"),
        ],
    )  # fmt: skip
    def test_compressions(self, mode: str, compression: str | None) -> None:
        data = file_of(photo(40, 61).convert(mode), "TIFF", compression=compression)
        assert np.array_equal(decode_image(data), pillow_rgb(data))

    def test_16_bit_colour_keeps_the_high_byte(self) -> None:
        deep = self.pixels.astype("<u2") * 257
        entries = {**self.rgb, 258: (3, [16, 16, 16]), 278: (4, 32), 279: (4, deep.nbytes)}
        assert np.array_equal(decode_image(tiff_file(entries, deep.tobytes())), self.pixels)

    def test_12_bit_grey_is_scaled_by_its_own_white(self) -> None:
        entries = {256: (4, 4), 257: (4, 1), 258: (3, 12), 259: (3, 1), 262: (3, 1), 277: (3, 1), 278: (4, 1)}
        levels = [0, 4095, 2048, 16]
        packed = int("".join(f"{level:012b}" for level in levels), 2).to_bytes(6, "big")
        found = decode_image(tiff_file({**entries, 279: (4, 6)}, packed))
        assert found[0, :, 0].tolist() == [0, 255, 128, 1]

    def test_ink(self) -> None:
        ink = np.asarray(photo(32, 48, "CMYK"))
        entries = {**self.rgb, 258: (3, [8] * 4), 262: (3, 5), 277: (3, 4), 278: (4, 32), 279: (4, ink.nbytes)}
        expected = Image.fromarray(ink, mode="CMYK").convert("RGB")
        assert np.array_equal(decode_image(tiff_file(entries, ink.tobytes())), np.asarray(expected))

    def test_white_is_zero(self) -> None:
        grey = np.asarray(photo(32, 48, "L"))
        entries = {**self.rgb, 258: (3, 8), 262: (3, 0), 277: (3, 1), 278: (4, 32), 279: (4, grey.nbytes)}
        assert np.array_equal(decode_image(tiff_file(entries, grey.tobytes()))[:, :, 1], 255 - grey)

    def test_bigtiff_is_read_or_refused(self) -> None:
        data = file_of(photo(9, 11), "TIFF", big_tiff=True)
        assert data[2:4] == b"+\0"
        assert np.array_equal(decode_image(data), np.asarray(photo(9, 11)))

    def test_the_first_page(self) -> None:
        pages = [photo(10, 12, seed=1), photo(30, 40, seed=2)]
        data = file_of(pages[0], "TIFF", save_all=True, append_images=pages[1:])
        assert Image.open(io.BytesIO(data)).n_frames == 2
        assert np.array_equal(decode_image(data), np.asarray(pages[0]))


@pytest.mark.parametrize("name", ["PNG", "JPEG", "WEBP", "TIFF", "AVIF"])
def test_a_colour_profile_changes_nothing_in_any_format(name: str) -> None:
    """A profile that a colour-managed viewer would turn the picture's colours by."""
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("LAB")).tobytes()
    options = {"lossless": True} if name == "WEBP" else {}
    with_profile = file_of(photo(20, 31), name, icc_profile=profile, **options)
    assert pillow(with_profile).info["icc_profile"] == profile
    assert np.array_equal(decode_image(with_profile), decode_image(file_of(photo(20, 31), name, **options)))


def test_gamma_and_chromaticities_of_a_png_change_nothing() -> None:
    rows = bytes([0, 1, 2, 3, 99, 98, 97])
    chunks = [png_chunk(b"gAMA", struct.pack(">I", 200_000)), png_chunk(b"cHRM", struct.pack(">8I", *range(1, 9)))]
    assert np.array_equal(decode_image(png_file(2, 1, 8, 2, rows, *chunks)), decode_image(png_file(2, 1, 8, 2, rows)))
