"""The eight EXIF orientations, as views and copies of a pixel array."""

import numpy as np
from PIL import ExifTags, Image

UPRIGHT = 1
# Orientation that undoes each: all are their own inverse but the two quarter turns.
INVERSE = {1: 1, 2: 2, 3: 3, 4: 4, 5: 5, 6: 8, 7: 7, 8: 6}


def exif_orientation(image: Image.Image) -> int:
    """EXIF (or XMP) orientation of a picture, 1 to 8; 1 where there is none, or none that can be read.

    PNG and TIFF carry it after the pixels too: call it once the picture is loaded.
    """
    try:
        found = image.getexif().get(ExifTags.Base.Orientation, UPRIGHT)
    except Exception:  # Pillow raises many kinds for broken EXIF, which is no reason to refuse the pixels
        return UPRIGHT
    return found if isinstance(found, int) and found in INVERSE else UPRIGHT


def turn(pixels: np.ndarray, orientation: int) -> np.ndarray:
    """Pixels [h, w, c] as they are meant to be seen; [w, h, c] for orientations 5 to 8. Contiguous."""
    if orientation == UPRIGHT:
        return pixels
    flipped = {
        2: pixels[:, ::-1],
        3: pixels[::-1, ::-1],
        4: pixels[::-1],
        5: pixels.swapaxes(0, 1),
        6: pixels[::-1].swapaxes(0, 1),
        7: pixels[::-1, ::-1].swapaxes(0, 1),
        8: pixels[:, ::-1].swapaxes(0, 1),
    }
    return np.ascontiguousarray(flipped[orientation])
