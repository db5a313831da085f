"""Any mode Pillow reads, as RGB bytes: transparency on a background, deep grey scaled, CMYK converted."""

import numpy as np
from PIL import Image

from encoder.errors import InvalidImage
from encoder.preprocess.policy import Colour

DEEPEST_GREY = 0xFFFF
BITS_PER_SAMPLE_TAG = 258


def to_rgb(image: Image.Image, background: Colour) -> np.ndarray:
    """A loaded picture as uint8 [h, w, 3], contiguous and writable.

    Raises InvalidImage for samples without a defined white (floats, integers beyond 16 bits).
    """
    if image.mode.startswith("I"):
        return _deep_grey(image, background)
    if image.mode == "F":
        raise InvalidImage("a picture of floating point samples has no defined white; send 8 or 16 bits a sample")
    if has_transparency(image):
        return on_background(image, background)
    return np.array(image if image.mode == "RGB" else image.convert("RGB"))


def has_transparency(image: Image.Image) -> bool:
    """Whether some pixel may let the background through: an alpha band, or a transparent colour or palette entry."""
    return image.mode in {"RGBA", "LA", "PA", "RGBa", "La"} or image.info.get("transparency") is not None


def on_background(image: Image.Image, background: Colour) -> np.ndarray:
    """Composited over an opaque colour, as uint8 [h, w, 3]; the colour hidden under alpha 0 never shows."""
    straight = image.convert("LA") if image.mode == "La" else image
    ground = Image.new("RGBA", image.size, (*background, 255))
    return np.array(Image.alpha_composite(ground, straight.convert("RGBA")).convert("RGB"))


def cmyk_to_rgb(ink: np.ndarray) -> np.ndarray:
    """Ink amounts uint8 [h, w, 4] (0: none, 255: full) as uint8 [h, w, 3], without colour management."""
    height, width, _ = ink.shape
    return np.array(Image.frombytes("CMYK", (width, height), np.ascontiguousarray(ink).data).convert("RGB"))


def _deep_grey(image: Image.Image, background: Colour) -> np.ndarray:
    samples = np.asarray(image)
    if samples.size and (int(samples.min()) < 0 or int(samples.max()) > DEEPEST_GREY):
        raise InvalidImage("a grey picture with samples beyond 16 bits has no defined white; send 8 or 16 bits")
    # The high byte, which is what Pillow keeps of 16-bit colour: a grey picture looks the same saved either way.
    pixels = np.repeat((samples >> _depth(image) - 8).astype(np.uint8)[:, :, None], 3, axis=2)
    transparent = image.info.get("transparency")
    if isinstance(transparent, int):
        pixels[samples == transparent] = background
    return pixels


def _depth(image: Image.Image) -> int:
    """Bits of a deep grey sample: 12 in a TIFF that says so, which Pillow unpacks without scaling, else 16."""
    bits = getattr(image, "tag_v2", {}).get(BITS_PER_SAMPLE_TAG)
    return 12 if bits in {12, (12,)} else 16
