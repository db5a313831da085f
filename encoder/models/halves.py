"""What the families share: towers for pictures, for pictures of one size, and for tokenised texts."""

from abc import abstractmethod
from collections.abc import Sequence
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch

from encoder.errors import CheckpointError
from encoder.golden import golden_pictures, golden_texts
from encoder.models.tower import Inputs, Tower
from encoder.preprocess.text import TextPipeline, TokenizedText
from encoder.preprocess.transform import ImageTransform

Item = TypeVar("Item")
PIXELS = "pixel_values"


class VisionTower(Tower[Item]):
    """A tower for pictures, however it prepares them."""

    @abstractmethod
    def prepare(self, pixels: np.ndarray) -> Item:
        """RGB pixels uint8 [h, w, 3] as an item; any thread. Raises InvalidImage for a shape that it does not take."""


class PictureTower(VisionTower[np.ndarray]):
    """Items are pixels [3, H, W] as `ImageTransform.resize_crop` gives them; inputs are normalised, [n, 3, H, W]."""

    transform: ImageTransform
    patch_size: int

    def prepare(self, pixels: np.ndarray) -> np.ndarray:
        return self.transform.resize_crop(pixels)

    def require_size(self, name: str, image_size: Any) -> None:
        """Raises CheckpointError when the image processor's output has not the size the model's positions are for."""
        side = one_side(name, "image_size", image_size)
        if self.transform.output_size != (side, side):
            height, width = self.transform.output_size
            raise CheckpointError(
                f"{name}: its image processor gives pictures of {height}x{width}, its model takes {side}x{side}: "
                "correct preprocessor_config.json"
            )

    def grid_of(self, item: np.ndarray) -> tuple[int, ...]:
        height, width = item.shape[1:]
        return height // self.patch_size, width // self.patch_size

    def collate(self, items: Sequence[np.ndarray], *, length: int | None = None) -> dict[str, torch.Tensor]:
        return self.finish(self.gather(items, length=length))

    def gather(self, items: Sequence[np.ndarray], *, length: int | None = None) -> dict[str, torch.Tensor]:
        """Levels as they are, a quarter of the bytes, where single operations finish them.

        A processor that rescales first has floats already, and the mode `pil` looks levels up in a table, which a graph
        would have to be given.
        """
        pixels = np.stack(items)
        as_they_are = pixels.dtype == np.uint8 and self.transform.mode == "torch"
        return {PIXELS: torch.from_numpy(pixels if as_they_are else self.transform.normalize(pixels))}

    def finish(self, inputs: Inputs, *, alone: bool = False) -> dict[str, torch.Tensor]:
        pixels = inputs[PIXELS]
        if pixels.dtype is torch.uint8:
            pixels = self.transform.normalize_tensor(pixels, alone=alone)
        return {PIXELS: pixels}

    def golden_items(self) -> list[np.ndarray]:
        return [self.transform.of_levels(picture) for picture in golden_pictures(*self.transform.output_size)]

    def describe_preprocessing(self) -> dict[str, Any]:
        return self.transform.describe()


def one_side(name: str, setting: str, value: Any) -> int:
    """The side of what is square; raises CheckpointError for another shape."""
    sides = set(value) if isinstance(value, list | tuple) else {value}
    if len(sides) != 1:
        raise CheckpointError(f"{name}: {setting}={value} is not square, which no family here serves")
    return int(sides.pop())


class TextTower(Tower[TokenizedText]):
    """Items are tokenised texts; inputs are ids int64 [n, L] and, True where a token is, a mask [n, 1, 1, L].

    Four dimensions make transformers hand the mask on as it is; the causal part it adds by itself.
    """

    pipeline: TextPipeline

    def collate(self, items: Sequence[TokenizedText], *, length: int | None = None) -> dict[str, torch.Tensor]:
        batch = self.pipeline.collate(list(items), pad_to=length)
        inputs = {"input_ids": torch.from_numpy(batch.input_ids)}
        if self.pipeline.pad_rule == "longest":
            inputs["attention_mask"] = torch.from_numpy(batch.attention_mask).bool()[:, None, None, :]
        return inputs

    def length_of(self, item: TokenizedText) -> int:
        return len(item.input_ids)

    def golden_items(self) -> list[TokenizedText]:
        encode = partial(self.pipeline.encode, overflow="truncate")
        return [encode(text) for text in golden_texts()]

    def describe_preprocessing(self) -> dict[str, Any]:
        return self.pipeline.describe()
