"""The decisions of decoding: what a picture may be, and how pixels are made where a format leaves a choice."""

from dataclasses import dataclass
from typing import ClassVar

from encoder.errors import InvalidImage, InvalidInput

Colour = tuple[int, int, int]
# Beyond this Pillow refuses by itself (twice its MAX_IMAGE_PIXELS, which is process-wide and stays as it is).
PILLOW_MAX_PIXELS = 178_956_970


@dataclass(frozen=True)
class DecodeLimits:
    """What a picture may be; all is checked before decoding. Raises InvalidInput for limits that cannot hold."""

    max_bytes: int = 32 * 1024 * 1024
    max_pixels: int = 64_000_000
    max_side: int = 32_768

    def __post_init__(self) -> None:
        if min(self.max_bytes, self.max_pixels, self.max_side) < 1:
            raise InvalidInput("decode limits: max_bytes, max_pixels and max_side must be 1 or more")
        if self.max_pixels > PILLOW_MAX_PIXELS:
            raise InvalidInput(f"decode limits: max_pixels can be {PILLOW_MAX_PIXELS} at most, Pillow takes no more")

    def check_bytes(self, length: int) -> None:
        """Raises InvalidImage when a file has too many bytes."""
        if length > self.max_bytes:
            raise InvalidImage(f"the file has {length} bytes: over the limit of {self.max_bytes}; scale it down")

    def check_size(self, width: int, height: int, what: str = "the picture") -> None:
        """Raises InvalidImage when something of this size is empty or too large."""
        size = f"{what} is {width}x{height}"
        if width < 1 or height < 1:
            raise InvalidImage(f"{size}: it has no pixels; send one that has")
        if max(width, height) > self.max_side:
            raise InvalidImage(f"{size}: a side is over the limit of {self.max_side}; scale it down")
        if width * height > self.max_pixels:
            raise InvalidImage(f"{size}: over the limit of {self.max_pixels} pixels; scale it down")


@dataclass(frozen=True)
class DecodePolicy:
    """How pixels are made; the table in `encoder.preprocess.decode` says it whole. Part of the fingerprint.

    `reduced_side`: a JPEG is decoded at half its size or less where no side gets shorter than this; 0: always whole.
    """

    apply_exif_orientation: bool = True
    background: Colour = (255, 255, 255)
    allow_truncated: bool = False
    reduced_side: int = 0

    version: ClassVar[int] = 2

    def __post_init__(self) -> None:
        if len(self.background) != 3 or any(not 0 <= level <= 255 for level in self.background):
            raise InvalidInput(f"decode policy: background {self.background} needs three levels of 0 to 255")

    def describe(self) -> dict[str, object]:
        """JSON-ready; decoders that describe themselves alike make the same pixels."""
        return {
            "version": self.version,
            "apply_exif_orientation": self.apply_exif_orientation,
            "background": list(self.background),
            "allow_truncated": self.allow_truncated,
            "frame": "first",
            "deep_samples": "high byte",
            "colour_profiles": "ignored",
            **({"reduced_side": self.reduced_side} if self.reduced_side else {}),
        }
