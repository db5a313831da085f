"""What a file is, read from its first bytes; a name or a declared type is never trusted."""

import re

from encoder.errors import InvalidImage
from encoder.preprocess.foreign import what_was_seen

ACCEPTED = "JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF"
AVIF_BRANDS = frozenset({b"avif", b"avis"})

_SIGNATURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II\0*", "TIFF"),  # these two have the wrong byte order in their version; Pillow reads them
    (b"MM*\0", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
)

_SPATIAL_EXTENTS = re.compile(rb"\0\0\0\x14ispe\0\0\0\0(.{4})(.{4})", re.DOTALL)


def picture_format(data: bytes) -> str:
    """Pillow's name of the format: JPEG, PNG, GIF, BMP, TIFF, WEBP or AVIF.

    Raises InvalidImage, naming what was seen, when it is none of these.
    """
    for signature, name in _SIGNATURES:
        if data.startswith(signature):
            return name
    if data[:4] == b"RIFF" and data[8:12] == b"WEBP":
        return "WEBP"
    brands = _brands(data)
    if brands & AVIF_BRANDS:
        return "AVIF"
    raise InvalidImage(f"not a supported picture: {what_was_seen(data, brands)}; send {ACCEPTED}")


def webp_size(data: bytes) -> tuple[int, int] | None:
    """(width, height) of a WebP canvas from its header (RFC 9649), None where the header is not understood.

    Pillow's WebP reader makes room for the whole canvas when it opens a file, so its size has to be known before.
    """
    kind, body = data[12:16], data[20:30]
    if len(body) < 10:
        return None
    if kind == b"VP8X":
        return 1 + int.from_bytes(body[4:7], "little"), 1 + int.from_bytes(body[7:10], "little")
    if kind == b"VP8L" and body[0] == 0x2F:
        bits = int.from_bytes(body[1:5], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if kind == b"VP8 " and body[3:6] == b"\x9d\x01\x2a":
        return int.from_bytes(body[6:8], "little") & 0x3FFF, int.from_bytes(body[8:10], "little") & 0x3FFF
    return None


def avif_size(data: bytes) -> tuple[int, int]:
    """(width, height) of the largest image in an AVIF file by its 'ispe' properties (ISO/IEC 23008-12), else (1, 1)."""
    sizes = [
        (int.from_bytes(found[1], "big"), int.from_bytes(found[2], "big")) for found in _SPATIAL_EXTENTS.finditer(data)
    ]
    return max(sizes, key=lambda size: size[0] * size[1], default=(1, 1))


def _brands(data: bytes) -> frozenset[bytes]:
    """The brands of an ISO base media file ('ftyp' box), none for anything else."""
    if data[4:8] != b"ftyp":
        return frozenset()
    end = min(int.from_bytes(data[:4], "big"), len(data), 256)
    return frozenset({data[8:12]} | {data[at : at + 4] for at in range(16, end, 4)})
