"""What a file is that is no picture of an accepted format: naming it tells its sender what to change."""

import re
import struct

HEIF_BRANDS = frozenset({b"heic", b"heix", b"hevc", b"heim", b"mif1", b"msf1"})
_AS_TEXT = "a file whose bytes were read as text, which loses them (read it as binary)"

_NOT_ACCEPTED = (
    (b"%PDF", "a PDF"),
    (b"%!PS", "a PostScript file"),
    (b"\xc5\xd0\xd3\xc6", "a PostScript file"),
    (b"\0\0\0\x0cjP  ", "a JPEG 2000 picture"),
    (b"\xff\x4f\xff\x51", "a JPEG 2000 picture"),
    (b"\xff\x0a", "a JPEG XL picture"),
    (b"\0\0\0\x0cJXL ", "a JPEG XL picture"),
    (b"icns", "an icon (ICNS)"),
    (b"8BPS", "a Photoshop file"),
    (b"qoif", "a QOI picture"),
    (b"DDS ", "a DDS texture"),
    (b"\x76\x2f\x31\x01", "an OpenEXR picture"),
    (b"\x0a\x05\x01", "a PCX picture"),
    (b"\x01\xda", "an SGI picture"),
    (b"#define ", "an X bitmap (XBM)"),
    (b"/* XPM */", "an X pixmap (XPM)"),
    (b"\xd7\xcd\xc6\x9a", "a Windows metafile (WMF)"),
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
    (b"\xef\xbf\xbd", _AS_TEXT),  # U+FFFD, which stands for what is no UTF-8
    (b"\xc3\xbf\xc3\x98\xc3\xbf", _AS_TEXT),  # FF D8 FF from Latin-1 to UTF-8
    (b"\xc2\x89PNG", _AS_TEXT),
    (b"\x89PNG", "a PNG whose first bytes are damaged, as a transfer as text does (send it as binary)"),
    (b"\xff\xd8", "a JPEG whose first bytes are damaged"),
)
_PORTABLE_ANYMAP = re.compile(rb"P[1-7fF][\s#]")
# Both name a count of pictures next; a TGA may begin alike, but with 0 for it.
_ICON, _CURSOR = (re.compile(rb"\0\0" + kind + rb"\0(?!\0\0)..", re.DOTALL) for kind in (b"\x01", b"\x02"))
_OF_OS2 = frozenset({b"BM", b"CI", b"CP", b"IC", b"PT"})
_OS2_HEADER_BYTES = (26, 78)
_TGA_FOOTER = b"TRUEVISION-XFILE."
_TGA_HEADER = struct.Struct("<BBBHHBHHHHBB")
# Bits of a pixel by kind: palette, colour, grey; a kind has 8 more when it is run-length coded.
_TGA_BITS = {1: (8, 16), 2: (15, 16, 24, 32), 3: (8, 16)}
_DIB_HEADER_BYTES = (40, 108, 124)
_DICOM_AT = 128


def what_was_seen(data: bytes, brands: frozenset[bytes]) -> str:
    """A few words for a file of none of the accepted formats; `brands`: those of an ISO base media file."""
    if brands:
        return "a HEIC picture" if brands & HEIF_BRANDS else "a video or another ISO media file"
    if data[:4] == b"RIFF":
        return "a video (AVI)" if data[8:12] == b"AVI " else "a RIFF file that is no WebP"
    if data[_DICOM_AT : _DICOM_AT + 4] == b"DICM":
        return "a DICOM file"
    if _PORTABLE_ANYMAP.match(data):
        return "a portable anymap (PBM, PGM, PPM)"
    if _ICON.match(data):
        return "an icon (ICO)"
    if _CURSOR.match(data):
        return "a cursor (CUR)"
    if _is_of_os2(data):
        return "an OS/2 icon or bitmap array"
    head = data[:64].lstrip().lower()
    if head.startswith((b"<?xml", b"<!--", b"<!doctype")) and b"<svg" in data[:4096].lower():
        return "an SVG drawing"
    for signature, name in _NOT_ACCEPTED:
        if data.startswith(signature) or head.startswith(signature):
            return name
    if data[12:14] == b"\x01\0" and int.from_bytes(data[:4], "little") in _DIB_HEADER_BYTES:
        return "a bitmap without its file header (DIB; save it as BMP)"
    if _is_tga(data):
        return "a TGA picture"
    return f"starts with bytes {data[:8].hex(' ')}"


def _is_of_os2(data: bytes) -> bool:
    if data[:2] == b"BA":
        return data[14:16] in _OF_OS2
    return data[:2] in _OF_OS2 and int.from_bytes(data[2:6], "little") in _OS2_HEADER_BYTES


def _is_tga(data: bytes) -> bool:
    """TGA has no signature: by its footer, or by a header of which every field makes sense."""
    if data[-18:-1] == _TGA_FOOTER:
        return True
    if len(data) < _TGA_HEADER.size:
        return False
    _, has_colours, kind, _, colours, colour_bits, _, _, width, height, bits, _ = _TGA_HEADER.unpack(
        data[: _TGA_HEADER.size]
    )
    if (has_colours, colours > 0) not in {(0, False), (1, True)} or min(width, height) == 0:
        return False
    return bits in _TGA_BITS.get(kind & ~8, ()) and (colours == 0 or colour_bits in _TGA_BITS[2])
