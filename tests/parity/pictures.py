"""Pictures of mixed kinds, drawn by formula: each as a file, and as the RGB pixels that Pillow reads out of it.

The reference pixels follow the stated policies (EXIF orientation applied, alpha composited on white, 16 bits scaled)
with Pillow alone, so that a fault of the project's own decoder shows.
"""

import io
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageOps

SIZES = [
    (480, 640), (640, 427), (224, 224), (333, 500), (97, 101), (256, 1024), (700, 90), (31, 47),
    (225, 223), (512, 512), (600, 337), (60, 240), (1, 50), (336, 336), (415, 415), (129, 384),
]  # fmt: skip
ORIENTATION_TAG = 0x0112


@dataclass(frozen=True)
class Picture:
    """One picture: its file, and the RGB image that its file stands for."""

    name: str
    data: bytes
    rgb: Image.Image


def drawn(count: int) -> list[Picture]:
    """The first `count` of an endless series: kinds and sizes go round at different paces."""
    return [_picture(index) for index in range(count)]


def scene(height: int, width: int, index: int) -> np.ndarray:
    """uint8 [height, width, 3]: smooth waves, a disc with a hard edge, and some noise."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    u, v = x / max(width, 2), y / max(height, 2)
    levels = np.stack([0.5 + 0.4 * np.sin((3 + index % 7) * u * k + (2 + index % 5) * v + k) for k in (1, 2, 3)], -1)
    disc = (u - 0.3 - 0.05 * (index % 9)) ** 2 + (v - 0.5) ** 2 < 0.05
    levels[disc] = np.array([index * 37 % 101, index * 53 % 97, index * 71 % 89]) / 101
    noise = np.random.default_rng(index).random((height, width, 3)) - 0.5
    return np.rint((levels + 0.1 * noise).clip(0, 1) * 255).astype(np.uint8)


def _picture(index: int) -> Picture:
    name, write = KINDS[index % len(KINDS)]
    height, width = SIZES[(index * 5 + index // len(KINDS)) % len(SIZES)]
    data = write(scene(height, width, index), index)
    return Picture(f"{index:02d}-{name}-{height}x{width}", data, _read(data))


def _read(data: bytes) -> Image.Image:
    image = ImageOps.exif_transpose(Image.open(io.BytesIO(data)))
    if image.mode.startswith("I;16"):
        return Image.fromarray((np.asarray(image) // 257).astype(np.uint8)).convert("RGB")
    if image.has_transparency_data:
        white = Image.new("RGBA", image.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, image.convert("RGBA")).convert("RGB")
    return image.convert("RGB")


def _save(image: Image.Image, form: str, **options: object) -> bytes:
    stream = io.BytesIO()
    image.save(stream, form, **options)  # type: ignore[arg-type]
    return stream.getvalue()


def _jpeg(mode: str = "RGB", **options: object) -> Callable[[np.ndarray, int], bytes]:
    return lambda pixels, index: _save(Image.fromarray(pixels).convert(mode), "JPEG", **options)


def _plain(form: str, mode: str = "RGB", **options: object) -> Callable[[np.ndarray, int], bytes]:
    return lambda pixels, index: _save(Image.fromarray(pixels).convert(mode), form, **options)


def _turned(pixels: np.ndarray, index: int) -> bytes:
    exif = Image.Exif()
    exif[ORIENTATION_TAG] = 1 + index % 8
    return _save(Image.fromarray(pixels), "JPEG", exif=exif, quality=90)


def _with_alpha(pixels: np.ndarray, index: int) -> bytes:
    alpha = (np.arange(pixels.shape[0])[:, None] * 3 + np.arange(pixels.shape[1]) * 5 + index) % 256
    return _save(Image.fromarray(np.dstack([pixels, alpha.astype(np.uint8)])), "PNG")


def _clear_colour(pixels: np.ndarray, index: int) -> bytes:
    return _save(Image.fromarray(pixels).convert("P"), "PNG", transparency=index % 50)


def _sixteen_bits(pixels: np.ndarray, index: int) -> bytes:
    return _save(Image.fromarray(pixels[:, :, 1].astype(np.uint16) * 257), "PNG")


KINDS: list[tuple[str, Callable[[np.ndarray, int], bytes]]] = [
    ("jpeg", _jpeg(quality=90)),
    ("png", _plain("PNG")),
    ("jpeg444", _jpeg(quality=95, subsampling=0)),
    ("webp", _plain("WEBP", quality=85)),
    ("rgba", _with_alpha),
    ("progressive", _jpeg(quality=80, progressive=True)),
    ("grey", _jpeg("L", quality=90)),
    ("turned", _turned),
    ("palette", _plain("PNG", "P")),
    ("gif", _plain("GIF", "P")),
    ("bmp", _plain("BMP")),
    ("clear-colour", _clear_colour),
    ("tiff", _plain("TIFF", compression="tiff_lzw")),
    ("sixteen-bit", _sixteen_bits),
    ("bilevel", _plain("PNG", "1")),
]
