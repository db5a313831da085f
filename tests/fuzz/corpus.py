"""Where fuzzing starts from: small whole files of every format and kind, and texts that have been trouble to others."""

import io
import struct
from functools import lru_cache
from typing import Any

import numpy as np
from PIL import Image, ImageCms

from tests.preprocess.pictures import file_of, photo, png_chunk, png_file, with_segment, without_segment

KINDS: list[tuple[str, str, dict[str, Any]]] = [
    ("JPEG", "RGB", {}),
    ("JPEG", "RGB", {"progressive": True, "subsampling": "4:4:4"}),
    ("JPEG", "L", {"restart_marker_blocks": 1}),
    ("JPEG", "CMYK", {}),
    ("PNG", "RGB", {}),
    ("PNG", "RGBA", {}),
    ("PNG", "P", {}),
    ("PNG", "1", {}),
    ("PNG", "I;16", {}),
    ("WEBP", "RGB", {}),
    ("WEBP", "RGBA", {"lossless": True}),
    ("GIF", "P", {}),
    ("GIF", "L", {"interlace": False}),
    ("BMP", "RGB", {}),
    ("BMP", "P", {}),
    ("BMP", "1", {}),
    ("TIFF", "RGB", {}),
    ("TIFF", "RGB", {"compression": "tiff_lzw"}),
    ("TIFF", "RGB", {"compression": "jpeg"}),
    ("TIFF", "L", {"compression": "packbits"}),
    ("TIFF", "1", {"compression": "group4"}),
    ("TIFF", "CMYK", {"compression": "tiff_adobe_deflate"}),
    ("TIFF", "I;16", {}),
    ("AVIF", "RGB", {}),
    ("AVIF", "RGBA", {}),
]


@lru_cache
def pictures() -> tuple[bytes, ...]:
    """Whole files, a few hundred bytes to a few thousand each."""
    made = [file_of(_picture(mode), name, **options) for name, mode, options in KINDS]
    frames = [photo(14, 18, seed=n) for n in range(3)]
    for name in ("GIF", "PNG", "WEBP", "TIFF", "MPO", "AVIF"):
        made.append(file_of(frames[0], name, save_all=True, append_images=frames[1:]))
    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile("sRGB")).tobytes()
    exif = Image.Exif()
    exif[0x0112] = 6
    for name in ("JPEG", "PNG", "WEBP", "TIFF"):
        made.append(file_of(frames[0], name, icc_profile=profile, exif=exif))
    made.append(without_segment(file_of(_picture("CMYK"), "JPEG"), 0xEE))
    made.append(with_segment(made[0], 0xE1, b'http://ns.adobe.com/xap/1.0/\0<x tiff:Orientation="6"/>'))
    made.append(png_file(4, 1, 16, 0, bytes(9), png_chunk(b"tRNS", b"\0\0"), png_chunk(b"eXIf", b"II*\0")))
    made.append(file_of(_picture("P"), "PNG", transparency=bytes(range(40))))
    runs = bytes([4, 1, 0, 0, 2, 0, 2, 1, 0, 2, 1, 1, 0, 1])
    info = struct.pack("<IiiHHIIiiII", 40, 4, 2, 1, 8, 1, len(runs), 0, 0, 2, 0)
    made.append(b"BM" + struct.pack("<IHHI", 62 + len(runs), 0, 0, 62) + info + bytes(8) + runs)
    return tuple(made)


TEXTS = (
    "", " ", "a photo of a cat", "A Photo OF a\n\tCat", "\0\x01\x1b\x7f", "é" + "\u0301" * 50, "مرحبا بالعالم שלום",
    "👩‍👩‍👧🇩🇪😀", "日本語 한국어", "\u200b\ufeff\u202e", "a b " * 200, "x" * 3000, "<|endoftext|> in the middle",
    "\U0010ffff\ue000", "\r\n" * 100,
)  # fmt: skip


def _picture(mode: str) -> Image.Image:
    if mode == "I;16":
        return Image.fromarray(np.random.default_rng(1).integers(0, 65536, (14, 18), dtype=np.uint16))
    image = photo(14, 18, "RGB")
    if mode == "RGBA":
        image = image.convert("RGBA")
        image.putalpha(photo(14, 18, "L", seed=2))
        return image
    return image.convert(mode)


def checked(data: bytes) -> bytes:
    """The file, once Pillow has read it: a seed that is no picture tests nothing."""
    Image.open(io.BytesIO(data)).load()
    return data
