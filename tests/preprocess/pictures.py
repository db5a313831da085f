"""Pictures and picture files for the tests, made on the spot."""

import io
import struct
import zlib
from typing import Any

import numpy as np
from PIL import Image


def photo(height: int, width: int, mode: str = "RGB", seed: int = 0) -> Image.Image:
    """Smooth colours with some noise, as a camera gives them."""
    rng = np.random.default_rng(seed)
    blobs = Image.fromarray(rng.integers(0, 255, (9, 12, 3), dtype=np.uint8))
    smooth = np.asarray(blobs.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
    noisy = np.clip(smooth + rng.normal(0, 6, smooth.shape), 0, 255).astype(np.uint8)
    return Image.fromarray(noisy).convert(mode)


def file_of(image: Image.Image, name: str, **options: Any) -> bytes:
    """The image as a file of the format `name`."""
    buffer = io.BytesIO()
    image.save(buffer, name, **options)
    return buffer.getvalue()


def pillow(data: bytes) -> Image.Image:
    """The file as Pillow reads it, loaded."""
    image = Image.open(io.BytesIO(data))
    image.load()
    return image


def pillow_rgb(data: bytes) -> np.ndarray:
    """RGB pixels as Pillow reads and converts them."""
    return np.asarray(pillow(data).convert("RGB"))


def png_chunk(kind: bytes, body: bytes) -> bytes:
    return struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))


def png_file(width: int, height: int, depth: int, colour_type: int, rows: bytes, *chunks: bytes) -> bytes:
    """A PNG by hand. `rows`: each row with its filter byte; `chunks` come before the pixels."""
    header = struct.pack(">IIBBBBB", width, height, depth, colour_type, 0, 0, 0)
    body = [png_chunk(b"IHDR", header), *chunks, png_chunk(b"IDAT", zlib.compress(rows)), png_chunk(b"IEND", b"")]
    return b"\x89PNG\r\n\x1a\n" + b"".join(body)


def without_segment(jpeg: bytes, marker: int) -> bytes:
    """A JPEG without its first segment of a kind, e.g. 0xEE for Adobe's."""
    at = 2
    while jpeg[at + 1] != marker:
        at += 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big")
    return jpeg[:at] + jpeg[at + 2 + int.from_bytes(jpeg[at + 2 : at + 4], "big") :]


def with_segment(jpeg: bytes, marker: int, body: bytes) -> bytes:
    """A JPEG with a segment put in first."""
    return jpeg[:2] + bytes([0xFF, marker]) + struct.pack(">H", len(body) + 2) + body + jpeg[2:]


def tiff_file(entries: dict[int, tuple[int, int | list[int]]], data: bytes, order: str = "<") -> bytes:
    """A TIFF of one directory; `entries`: tag to (type, value or values), the offset of `data` (273, 324) left out."""
    sizes = {1: 1, 3: 2, 4: 4}
    codes = {1: "B", 3: "H", 4: "I"}
    entries = {**entries}
    head = 8 + 2 + 12 * (len(entries) + 1) + 4
    extra, tags = b"", b""
    at_tag = 324 if 322 in entries else 273
    long_ones = sum(
        sizes[kind] * len(value) for kind, value in entries.values() if isinstance(value, list) and len(value) > 1
    )
    entries[at_tag] = (4, head + long_ones)
    for tag, (kind, value) in sorted(entries.items()):
        values = value if isinstance(value, list) else [value]
        packed = struct.pack(f"{order}{len(values)}{codes[kind]}", *values)
        if len(packed) > 4:
            packed, extra = struct.pack(f"{order}I", head + len(extra)), extra + packed
        tags += struct.pack(f"{order}HHI", tag, kind, len(values)) + packed.ljust(4, b"\0")
    start = struct.pack(f"{order}2sHI", b"II" if order == "<" else b"MM", 42, 8)
    return start + struct.pack(f"{order}H", len(entries)) + tags + bytes(4) + extra + data
