"""Where pixels go: the size a picture is resized to, and the part of it that is kept."""

from dataclasses import dataclass
from typing import Literal

from encoder.errors import InvalidImage

Edge = Literal["shortest", "shortest_capped", "within", "squash"]


@dataclass(frozen=True)
class Resize:
    """The size to resize to; rounding as in transformers 5.24 (`get_resize_output_image_size` and its neighbours).

    shortest: the shorter side becomes `height` (= `width`), the longer one follows.
    shortest_capped: as shortest, but the longer side stays within `cap`.
    within: as large as fits `height` x `width` with the picture's own proportions.
    squash: `height` x `width`, whatever the proportions.
    """

    edge: Edge
    height: int
    width: int
    cap: int = 0

    def target(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) after resizing. Raises InvalidImage for a picture so narrow that nothing would be left."""
        new = self._target(height, width)
        if min(new) < 1:
            raise InvalidImage(f"the picture is {width}x{height}: too narrow for this model, a side would shrink to 0")
        return new

    def _target(self, height: int, width: int) -> tuple[int, int]:
        if self.edge == "squash":
            return self.height, self.width
        if self.edge == "within":
            scale = min(self.height / height, self.width / width)
            return int(height * scale), int(width * scale)
        short, long = min(height, width), max(height, width)
        if self.edge == "shortest":
            size, other = self.height, int(self.height * long / short)
        else:
            size, other = self._capped(short, long)
        return (other, size) if width <= height else (size, other)

    def _capped(self, short: int, long: int) -> tuple[int, int]:
        wanted: float = self.height
        size = self.height
        if long / short * wanted > self.cap:
            wanted = self.cap * float(short) / float(long)
            size = round(wanted)
        return (short, long) if short == size else (size, int(wanted * long / short))


@dataclass(frozen=True)
class Span:
    """What is kept of one axis: source pixels [start, start + length), put at `offset` of the crop."""

    start: int
    length: int
    offset: int


def center_span(size: int, crop: int, *, pad_before: Literal["floor", "ceil"]) -> Span:
    """The middle of an axis; a shorter one is padded with zeros, the odd one before or after.

    torchvision's crop pads the smaller half before ("floor"), the numpy one of transformers the larger ("ceil").
    """
    if size >= crop:
        return Span(start=(size - crop) // 2, length=crop, offset=0)
    missing = crop - size
    return Span(start=0, length=size, offset=missing // 2 if pad_before == "floor" else (missing + 1) // 2)
