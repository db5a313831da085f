"""PIL images to raw pixels. The only module of the client that imports PIL; it is loaded with the first PIL image."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt
from PIL import Image, ImageOps

from encoder.client.sources import ItemRefused

_AS_THEY_ARE = ("L", "RGB", "RGBA")
_SIXTEEN_BITS = ("I;16", "I;16L", "I;16B", "I;16N")
_NO_FIXED_RANGE = ("I", "F")


def pil_pixels(image: Image.Image) -> npt.NDArray[Any]:
    """uint8 [h, w] or [h, w, 3|4] of a PIL image, turned upright by its EXIF orientation.

    L, RGB and RGBA go as they are; modes with transparency become RGBA, 16-bit grey keeps its high byte, bilevel
    becomes L and every other mode RGB. Raises ItemRefused for I and F, whose values have no fixed range, and for a
    file that PIL cannot decode.
    """
    if image.mode in _NO_FIXED_RANGE:
        raise ItemRefused(f"PIL mode {image.mode} has no fixed range: scale it and convert it to L or RGB first")
    try:
        # Always a copy: the caller's image stays as it is.
        upright = ImageOps.exif_transpose(image)
        return _pixels(upright)
    except (OSError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise ItemRefused(f"PIL cannot decode it: {error}") from error


def _pixels(image: Image.Image) -> npt.NDArray[Any]:
    if image.mode in _SIXTEEN_BITS:
        # PIL's own conversion to L would clip at 255.
        return (np.asarray(image) >> 8).astype(np.uint8)
    if image.mode == "La":
        image = image.convert("LA")
    if image.has_transparency_data:
        return np.asarray(image.convert("RGBA"))
    if image.mode == "1":
        return np.asarray(image.convert("L"))
    return np.asarray(image if image.mode in _AS_THEY_ARE else image.convert("RGB"))
