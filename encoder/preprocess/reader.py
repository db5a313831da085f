"""Pillow as a reader: header first, limits next, pixels last."""

import importlib
import io

from PIL import Image, ImageFile, UnidentifiedImageError

from encoder.preprocess.orientation import INVERSE, UPRIGHT
from encoder.preprocess.png import check_chunks, fix_transparent_colour, without_text
from encoder.preprocess.policy import DecodeLimits
from encoder.preprocess.sniff import avif_size, webp_size

ORIENTATION_TAG, TILE_WIDTH_TAG, TILE_LENGTH_TAG = 274, 322, 323

# Named here so that the first request of a format does not make Pillow import all its readers.
for _reader in ("Jpeg", "Mpo", "Png", "WebP", "Gif", "Bmp", "Tiff"):
    importlib.import_module(f"PIL.{_reader}ImagePlugin")


def open_picture(content: bytes, name: str, limits: DecodeLimits) -> ImageFile.ImageFile:
    """The header alone. Raises InvalidImage beyond the limits, and whatever Pillow raises for a broken header."""
    if name == "WEBP" and (size := webp_size(content)) is not None:
        limits.check_size(*size)
    if name == "PNG":
        check_chunks(content)
    try:
        image = Image.open(io.BytesIO(content), formats=(name,))
    except UnidentifiedImageError:
        if name == "AVIF":  # libavif opens nothing beyond a limit of its own
            limits.check_size(*avif_size(content))
        raise
    limits.check_size(*image.size)
    tags = getattr(image, "tag_v2", {})
    if TILE_WIDTH_TAG in tags and TILE_LENGTH_TAG in tags:  # a small picture can come as a huge tile
        limits.check_size(tags[TILE_WIDTH_TAG], tags[TILE_LENGTH_TAG], what="a tile of the TIFF")
    return image


def read_picture(content: bytes, name: str, limits: DecodeLimits, *, allow_truncated: bool) -> tuple[Image.Image, int]:
    """The first frame, loaded, and the orientation that is in its pixels already (a TIFF's; 1 for all others)."""
    try:
        image, turned = _read(content, name, limits, allow_truncated)
    except ValueError:
        slim = without_text(content) if name == "PNG" else None
        if slim is None:
            raise
        image, turned = _read(slim, name, limits, allow_truncated)
    if name == "PNG":
        fix_transparent_colour(image, content)
    return image, turned


def _read(content: bytes, name: str, limits: DecodeLimits, allow_truncated: bool) -> tuple[Image.Image, int]:
    image = open_picture(content, name, limits)
    # Pillow turns a TIFF upright while loading and takes the tag away.
    found = getattr(image, "tag_v2", {}).get(ORIENTATION_TAG, UPRIGHT)
    try:
        image.load()
    except OSError as error:
        if not (allow_truncated and "truncated" in str(error)):
            raise
        # The rows that were decoded before the data ended are in the image; the others are zero.
        image.tile = []
        image.load()
    return image, found if found in INVERSE else UPRIGHT
