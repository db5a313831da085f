"""What the families with pictures of many sizes share: items of whole patches, packed one after the other."""

from abc import abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch

from encoder.attention.backend import ITEM_BOUNDARIES
from encoder.golden import golden_pictures
from encoder.models.halves import VisionTower
from encoder.models.tower import Inputs
from encoder.preprocess.variable import VariableTransform

PATCHES, PLACES = "patches", "places"
# Rows and columns of golden pictures, in features: wide, high, a single row, and two that the smallest budgets take.
GOLDEN_GRIDS = ((3, 5), (1, 2), (9, 5), (2, 2), (1, 7), (8, 8))


class PackedPictures(VisionTower[np.ndarray]):
    """Items are uint8 pixels [3, H, W] of whole patches; `merge` x `merge` patches make one feature."""

    transform: VariableTransform
    patch_size: int
    merge: int = 1
    golden_grids: ClassVar[Sequence[tuple[int, int]]] = GOLDEN_GRIDS

    def prepare(self, pixels: np.ndarray) -> np.ndarray:
        return self.transform.resize(pixels)

    def patch_grid(self, item: np.ndarray) -> tuple[int, int]:
        """Rows and columns of patches."""
        return item.shape[1] // self.patch_size, item.shape[2] // self.patch_size

    def length_of(self, item: np.ndarray) -> int:
        rows, columns = self.patch_grid(item)
        return rows * columns

    def grid_of(self, item: np.ndarray) -> tuple[int, ...]:
        rows, columns = self.patch_grid(item)
        return rows // self.merge, columns // self.merge

    def collate(self, items: Sequence[np.ndarray], *, length: int | None = None) -> dict[str, torch.Tensor]:
        return self.finish(self.levels(items))

    def gather(self, items: Sequence[np.ndarray], *, length: int | None = None) -> dict[str, torch.Tensor]:
        """Levels as they are, a quarter of the bytes, where the device can normalise them."""
        return self.levels(items) if self.transform.by_arithmetic else self.collate(items)

    @abstractmethod
    def levels(self, items: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """Inputs of a batch, its patches uint8 [T, 3 * p * p] as the family orders a patch's components."""

    def by_channel(self, patches: torch.Tensor) -> torch.Tensor:
        """A view [T, 3, p * p] of patches [T, 3 * p * p]."""
        return patches.unflatten(1, (3, -1))

    def in_patches(self, channels: torch.Tensor) -> torch.Tensor:
        """[T, 3 * p * p] of what `by_channel` gives."""
        return channels.flatten(1)

    def finish(self, inputs: Inputs, *, alone: bool = False) -> dict[str, torch.Tensor]:
        patches = inputs[PATCHES]
        if patches.dtype is torch.uint8:
            patches = self.in_patches(self.transform.normalize(self.by_channel(patches), alone=alone))
        return {**inputs, PATCHES: patches}

    def boundaries(self, items: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """Where the items end, int32 [n + 1]."""
        return {ITEM_BOUNDARIES: torch.tensor(np.cumsum([0, *map(self.length_of, items)]), dtype=torch.int32)}

    def golden_items(self) -> list[np.ndarray]:
        side = self.patch_size * self.merge
        pictures = [golden_pictures(rows * side, columns * side) for rows, columns in self.golden_grids]
        items = [made[place % len(made)] for place, made in enumerate(pictures)]
        return [item for item in items if self.length_of(item) <= self.spec.max_tokens]

    def describe_preprocessing(self) -> dict[str, Any]:
        return self.transform.describe()


def segment_means(features: torch.Tensor, boundaries: torch.Tensor) -> torch.Tensor:
    """Means in float32 [n, F] of features [T, F] between boundaries [n + 1]; zeros where a segment has none.

    A product with a matrix of members, since a captured graph may not read the boundaries on the host.
    """
    place = torch.arange(features.shape[0], device=features.device)[None]
    starts, ends = boundaries[:-1, None], boundaries[1:, None]
    members = ((place >= starts) & (place < ends)).float()
    return members @ features.float() / (ends - starts).clamp(min=1)
