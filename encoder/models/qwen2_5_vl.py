"""Qwen2.5-VL's vision tower: most layers attend within windows, a few within the picture.

A window is 8 x 8 patches, or what the picture's border leaves of one. Patches are packed window by window, so that
windows are segments as pictures are, with boundaries of their own; features are put back in order at the end.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLVisionConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VisionTransformerPretrainedModel
from transformers.vision_utils import get_vision_window_index

from encoder.attention.backend import ITEM_BOUNDARIES, WINDOW_BOUNDARIES
from encoder.models.checkpoint import Checkpoint
from encoder.models.packed import PATCHES, PLACES
from encoder.models.qwen_vl import QwenVision
from encoder.models.tower import Inputs, Tower, Windows
from encoder.settings import EngineSettings

RETURN = "return_index"


class Qwen25Vision(QwenVision):
    """Patches of 14, rotary positions, windows."""

    family = "qwen2_5_vl"
    config_class = Qwen2_5_VLVisionConfig
    model_class = Qwen2_5_VisionTransformerPretrainedModel

    def prepare_layers(self, vision: Any) -> None:
        self.window_size = vision.window_size
        self.whole_layers = frozenset(vision.fullatt_block_indexes)
        side, block = vision.window_size // self.patch_size // self.merge, self.merge**2
        # h x w blocks make at most (h + side - 1)(w + side - 1) / side² windows, which is at most hw / side + 1.
        self.windows = Windows(longest=side * side * block, share=side * block)

    def boundaries_of(self, layer: int) -> str:
        return ITEM_BOUNDARIES if layer in self.whole_layers else WINDOW_BOUNDARIES

    def in_order(self, features: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        return features[inputs[RETURN][:: self.merge**2]]

    def levels(self, items: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """Beside the shared inputs, which are in the order of windows: the windows' boundaries int32 [m + 1], and
        for each patch, where in that order the feature stands that is to take its block's place, int64 [T]."""
        inputs = super().levels(items)
        block = self.merge**2
        grids = torch.tensor([[1, *self.patch_grid(item)] for item in items])
        index, boundaries = get_vision_window_index(grids, self.merge, self.window_size, self.patch_size)
        for name in (PATCHES, PLACES):
            inputs[name] = inputs[name].unflatten(0, (-1, block))[index].flatten(0, 1)
        inputs[RETURN] = index.argsort().repeat_interleave(block)
        return {**inputs, WINDOW_BOUNDARIES: boundaries.int()}


def load_tower(checkpoint: Checkpoint, settings: EngineSettings) -> Tower[Any]:
    """The vision tower of a Qwen2.5-VL checkpoint."""
    return Qwen25Vision(checkpoint, settings)
