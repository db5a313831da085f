"""Qwen3-VL's vision tower: learned positions resized to each picture, beside the rotary ones.

The language model also adds features of three middle layers (deepstack) to its own first layers. They are no part of a
picture's tokens: neither loaded nor computed here, and not sent.
"""

from typing import Any

import torch
from transformers.models.qwen3_vl.configuration_qwen3_vl import Qwen3VLVisionConfig
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLVisionModel

from encoder.models.checkpoint import Checkpoint
from encoder.models.packed import PLACES
from encoder.models.qwen_vl import QwenVision
from encoder.models.tower import Inputs, Tower
from encoder.settings import EngineSettings


class Qwen3Vision(QwenVision):
    """Patches of 16; every layer attends within the picture."""

    family = "qwen3_vl"
    config_class = Qwen3VLVisionConfig
    model_class = Qwen3VLVisionModel

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> Any:
        vision = super().read_config(checkpoint)
        vision.deepstack_visual_indexes = []
        return vision

    def describe_features(self) -> str:
        return f"{super().describe_features()}, without deepstack features"

    def embed(self, inputs: Inputs) -> torch.Tensor:
        model: Any = self.module
        embedded = super().embed(inputs)
        return embedded + resampled_positions(model.pos_embed.weight, inputs[PLACES]).to(embedded.dtype)


def resampled_positions(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Position embeddings float32 [T, D] for patches at `places` [T, 4], out of a square table [P * P, D].

    What bilinear interpolation of the table to each picture's rows and columns gives there, corners on corners (as
    transformers 5.24 does), computed on the device.
    """
    side = int(table.shape[0] ** 0.5)
    source = places[:, :2].float() * (side - 1) / (places[:, 2:] - 1).clamp(min=1)  # 0 rows in the filler
    below = source.floor()
    share = source - below
    taps = torch.stack([below.long(), (below.long() + 1).clamp(max=side - 1)], dim=-1)
    weights = torch.stack([1 - share, share], dim=-1)
    index = (taps[:, 0, :, None] * side + taps[:, 1, None, :]).flatten(1)
    weight = (weights[:, 0, :, None] * weights[:, 1, None, :]).flatten(1)
    return (table[index] * weight[..., None]).sum(dim=1)


def load_tower(checkpoint: Checkpoint, settings: EngineSettings) -> Tower[Any]:
    """The vision tower of a Qwen3-VL checkpoint."""
    return Qwen3Vision(checkpoint, settings)
