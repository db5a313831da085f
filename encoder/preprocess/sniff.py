"""What a file is, read from its first bytes; a name or a declared type is never trusted."""

import re

from encoder.errors import InvalidImage

ACCEPTED = "JPEG, PNG, WebP, GIF, BMP, TIFF or AVIF"
AVIF_BRANDS = frozenset({b"avif", b"avis"})
HEIF_BRANDS = frozenset({b"heic", b"heix", b"hevc", b"heim", b"mif1", b"msf1"})

_SIGNATURES = (
    (b"\xff\xd8\xff", "JPEG"),
    (b"\x89PNG\r\n\x1a\n", "PNG"),
    (b"GIF87a", "GIF"),
    (b"GIF89a", "GIF"),
    (b"BM", "BMP"),
    (b"II*\0", "TIFF"),
    (b"MM\0*", "TIFF"),
    (b"II+\0", "TIFF"),
    (b"MM\0+", "TIFF"),
)

# Files that people send by mistake: naming them tells the caller what to change.
_NOT_ACCEPTED = (
    (b"%PDF", "a PDF"),
    (b"%!PS", "a PostScript file"),
    (b"\xc5\xd0\xd3\xc6", "a PostScript file"),
    (b"\0\0\0\x0cjP  ", "a JPEG 2000 picture"),
    (b"\xff\x4f\xff\x51", "a JPEG 2000 picture"),
    (b"\xff\x0a", "a JPEG XL picture"),
    (b"\0\0\0\x0cJXL ", "a JPEG XL picture"),
    (b"\0\0\x01\0", "an icon (ICO)"),
    (b"\0\0\x02\0", "a cursor (CUR)"),
    (b"icns", "an icon (ICNS)"),
    (b"8BPS", "a Photoshop file"),
    (b"qoif", "a QOI picture"),
    (b"DDS ", "a DDS texture"),
    (b"\x76\x2f\x31\x01", "an OpenEXR picture"),
    (b"#?RADIANCE", "a Radiance picture"),
    (b"SIMPLE  =", "a FITS file"),
    (b"FUJIFILMCCD-RAW", "a raw camera file"),
    (b"IIU\0", "a raw camera file"),
    (b"IIRO", "a raw camera file"),
    (b"BPG\xfb", "a BPG picture"),
    (b"gimp xcf", "a GIMP file"),
    (b"\x1a\x45\xdf\xa3", "a video (Matroska or WebM)"),
    (b"FLV\x01", "a video (FLV)"),
    (b"\0\0\x01\xba", "a video (MPEG)"),
    (b"\0\0\x01\xb3", "a video (MPEG)"),
    (b"OggS", "an Ogg file"),
    (b"\x93NUMPY", "a NumPy file (send its pixels as raw pixels)"),
    (b"PAR1", "a Parquet file"),
    (b"PK\x03\x04", "a ZIP archive"),
    (b"\x1f\x8b", "gzip data"),
    (b"Rar!", "a RAR archive"),
    (b"7z\xbc\xaf\x27\x1c", "a 7-Zip archive"),
    (b"<svg", "an SVG drawing"),
    (b"<?xml", "XML"),
    (b"<html", "HTML"),
    (b"<!doctype", "HTML"),
    (b"{", "JSON text"),
    (b"/9j/", "base64 text of a JPEG (send its bytes)"),
    (b"ivborw0kggo", "base64 text of a PNG (send its bytes)"),
    (b"r0lgod", "base64 text of a GIF (send its bytes)"),
    (b"uklgr", "base64 text of a WebP or another RIFF file (send its bytes)"),
    (b"data:", "a data URL (send the bytes it holds)"),
    (b"http://", "a URL (send the bytes it points to)"),
    (b"https://", "a URL (send the bytes it points to)"),
    (b"s3://", "a URL (send the bytes it points to)"),
    (b"file://", "a URL (send the bytes it points to)"),
    (b"version https://git-lfs", "a Git LFS pointer (fetch the file it stands for)"),
)
_PORTABLE_ANYMAP = re.compile(rb"P[1-7][\s#]")
_DICOM_AT = 128


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
    raise InvalidImage(f"not a picture: {_what_was_seen(data, brands)}; send {ACCEPTED}")


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


def _brands(data: bytes) -> frozenset[bytes]:
    """The brands of an ISO base media file ('ftyp' box), none for anything else."""
    if data[4:8] != b"ftyp":
        return frozenset()
    end = min(int.from_bytes(data[:4], "big"), len(data), 256)
    return frozenset({data[8:12]} | {data[at : at + 4] for at in range(16, end, 4)})


def _what_was_seen(data: bytes, brands: frozenset[bytes]) -> str:
    if brands:
        return "a HEIC picture" if brands & HEIF_BRANDS else "a video or another ISO media file"
    if data[:4] == b"RIFF":
        return "a video (AVI)" if data[8:12] == b"AVI " else "a RIFF file that is no WebP"
    if data[_DICOM_AT : _DICOM_AT + 4] == b"DICM":
        return "a DICOM file"
    if _PORTABLE_ANYMAP.match(data):
        return "a portable anymap (PBM, PGM, PPM)"
    head = data[:64].lstrip().lower()
    if head.startswith((b"<?xml", b"<!--", b"<!doctype")) and b"<svg" in data[:4096].lower():
        return "an SVG drawing"
    for signature, name in _NOT_ACCEPTED:
        if data.startswith(signature) or head.startswith(signature):
            return name
    return f"starts with bytes {data[:8].hex(' ')}"
