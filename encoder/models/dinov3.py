"""DINOv3's ViT: rotary positions on the patches, register tokens, no position embeddings.

The vector is the class token after the last norm: `pooler_output`, which the model card's usage takes
(facebook/dinov3-vits16-pretrain-lvd1689m).
"""

from typing import Any

import torch
from transformers import DINOv3ViTConfig, DINOv3ViTModel

from encoder.models.checkpoint import Checkpoint
from encoder.models.halves import one_side
from encoder.models.tower import Inputs, Tower, TowerOutput
from encoder.models.vision_only import VisionOnlyTower, require_vision
from encoder.models.weights import load_weights
from encoder.preprocess.transform import ImageTransform
from encoder.settings import EngineSettings


class FixedRotation(torch.nn.Module):
    """The rotary tables of pictures of one size, [t, head_dim] each, computed in float32 at load.

    The module that computes them keeps its frequencies in a buffer, which a half-precision module would round.
    """

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        super().__init__()
        self.cos = torch.nn.Buffer(cos, persistent=False)
        self.sin = torch.nn.Buffer(sin, persistent=False)

    def forward(self, pixel_values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.cos.to(pixel_values.dtype), self.sin.to(pixel_values.dtype)


class Dinov3(VisionOnlyTower):
    """Pooled at the class token, after the last norm; features are the patches', after that norm too."""

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        config: Any = DINOv3ViTConfig.from_dict(checkpoint.config)
        self.patch_size = one_side(checkpoint.name, "patch_size", config.patch_size)
        self.transform = ImageTransform.from_config(checkpoint.image_config(), settings.pixel_mode)
        self.prefix = 1 + config.num_register_tokens
        features = "last layer, after the last norm; class token and registers left out"
        self.spec = self.describe_as("dinov3_vit", config, features)
        module: Any = load_weights(checkpoint, DINOv3ViTModel)
        with torch.no_grad():
            rotation = module.rope_embeddings(torch.empty(1, 3, *self.transform.output_size))
        module.rope_embeddings = FixedRotation(*rotation)
        self.module = module

    def forward(self, inputs: Inputs) -> TowerOutput:
        found = self.module(pixel_values=inputs["pixel_values"])
        return TowerOutput(found.pooler_output, found.last_hidden_state[:, self.prefix :])


def load_tower(checkpoint: Checkpoint, settings: EngineSettings) -> Tower[Any]:
    """The vision tower of a DINOv3 ViT checkpoint; raises CheckpointError for its text tower."""
    require_vision(checkpoint, settings)
    return Dinov3(checkpoint, settings)
