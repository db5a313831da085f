"""Why a picture cannot be read, put for who sent it.

Pillow speaks of broken files and of kinds that it does not know in one breath, often in its own terms. What to do next
differs: a broken file has to be sent anew, one of another kind has to be saved anew.
"""

import io
import re
import struct
from typing import Any

from PIL import Image, TiffImagePlugin, UnidentifiedImageError

_BITS_PER_SAMPLE, _COMPRESSION, _SAMPLES_PER_PIXEL, _SAMPLE_FORMAT = 258, 259, 277, 339
_FLOATING_POINT = 3
_BIG_TIFF = 43
# TIFF compressions that libtiff may be built without, or that nothing here decodes.
_RARE_COMPRESSIONS = {
    34661: "JBIG",
    34676: "SGI LogLuv",
    34677: "SGI LogLuv",
    34712: "JPEG 2000",
    34887: "LERC",
    34925: "LZMA",
    50001: "WebP",
    50002: "JPEG XL",
}
_OF_ANOTHER_KIND = re.compile(r"unsupported|not supported|not implemented|unknown pixel mode", re.IGNORECASE)
_NO_HEADER, _NO_PIXELS = "its header cannot be read", "its pixel data cannot be decoded"
_PLAINLY = (
    (r"cannot identify image file|not identified by this driver|could not create decoder object", _NO_HEADER),
    (r"decoder error -?\d+|failed to read next frame", _NO_PIXELS),
    (r"cannot load this image|no more images in GIF file|image not found in GIF frame", "it has no pixel data"),
    (r"tile cannot extend outside image", "its pixels lie outside its size"),
    (r"image file is truncated( \(\d+ bytes not processed\))?", "the data ends before the picture does"),
    (r"broken PNG file \((.*) b'(.*)'\)", r"\1 \2"),
    (r"Truncated File Read", "the file ends within its header"),
)


def complaint(content: bytes, name: str, error: Exception) -> str:
    """One line about a picture of the format `name` that a reader gave up with `error`."""
    reason = _reason_of_header(content, name) if isinstance(error, UnidentifiedImageError) else _reason(error)
    kind = _tiff_kind(content, reason) if name == "TIFF" else None
    if kind is None and _OF_ANOTHER_KIND.search(reason):
        kind = re.sub(rf"^(unsupported )?({name} )?", "", reason, flags=re.IGNORECASE)
    if kind is not None:
        return f"{name} of a kind that is not supported ({kind}); save it as PNG or JPEG"
    return f"broken {name}: {_plainly(reason)}; send the whole, undamaged file"


def _reason_of_header(content: bytes, name: str) -> str:
    """What `Image.open` keeps to itself: it only tells that no reader took the file."""
    reader = Image.OPEN[name][0]
    try:
        reader(io.BytesIO(content), "")
    except Exception as error:
        return _reason(error)
    return _NO_HEADER


def _reason(error: Exception) -> str:
    """One line of an exception, without the addresses of objects."""
    cause = error.args[0] if isinstance(error, SyntaxError) and error.args else error
    if isinstance(cause, LookupError | struct.error):
        return "its structure is damaged"
    return re.sub(r" ?<[^<>]* object at 0x[0-9a-f]+>", "", " ".join(str(error).split()))[:200] or type(error).__name__


def _plainly(reason: str) -> str:
    return next((found.expand(plain) for said, plain in _PLAINLY if (found := re.fullmatch(said, reason))), reason)


def _tiff_kind(content: bytes, reason: str) -> str | None:
    """What is unusual about a TIFF that could not be read; None where it may as well be broken."""
    if content.startswith(b"MM\0+"):
        return "a big-endian BigTIFF"
    tags = _tiff_tags(content)
    if reason == "unknown pixel mode":
        bits, samples = max(_numbers(tags, _BITS_PER_SAMPLE, 1)), _numbers(tags, _SAMPLES_PER_PIXEL, 1)[0]
        floats = "floating point " if _FLOATING_POINT in _numbers(tags, _SAMPLE_FORMAT, 1) else ""
        return f"{samples} {floats}samples of {bits} bits a pixel"
    compression = _RARE_COMPRESSIONS.get(_numbers(tags, _COMPRESSION, 1)[0])
    return f"{compression} compression" if compression and _plainly(reason) == _NO_PIXELS else None


def _numbers(tags: dict[int, Any], tag: int, default: int) -> list[int]:
    """A tag's numbers, whatever a broken file has there."""
    value = tags.get(tag)
    return [found for found in (value if isinstance(value, tuple) else (value,)) if isinstance(found, int)] or [default]


def _tiff_tags(content: bytes) -> dict[int, Any]:
    """Tags of the first directory; none where it cannot be read."""
    file = io.BytesIO(content)
    try:
        directory = TiffImagePlugin.ImageFileDirectory_v2(file.read(16 if content[2] == _BIG_TIFF else 8))
        file.seek(directory.next)
        directory.load(file)
        return dict(directory)
    except Exception:  # as broken as it can be
        return {}
