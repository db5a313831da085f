"""DINOv2, with and without register tokens.

The vector is the class token after the last norm, `pooler_output` in transformers and `x_norm_clstoken` in the
publisher's code (facebookresearch/dinov2, `DinoVisionTransformer.forward` in evaluation). Positions are interpolated to
the processor's crop: the checkpoints were trained for 518 pixels and their processor crops 224.
"""

from typing import Any

from transformers import Dinov2Config, Dinov2Model, Dinov2WithRegistersConfig, Dinov2WithRegistersModel

from encoder.models.checkpoint import Checkpoint
from encoder.models.halves import one_side
from encoder.models.tower import Inputs, Tower, TowerOutput
from encoder.models.vision_only import VisionOnlyTower, fix_positions, require_vision
from encoder.models.weights import load_weights
from encoder.preprocess.transform import ImageTransform
from encoder.settings import EngineSettings


class Dinov2(VisionOnlyTower):
    """Pooled at the class token, after the last norm; features are the patches', after that norm too."""

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        with_registers = checkpoint.model_type == "dinov2_with_registers"
        config_class, model_class = (
            (Dinov2WithRegistersConfig, Dinov2WithRegistersModel) if with_registers else (Dinov2Config, Dinov2Model)
        )
        config: Any = config_class.from_dict(checkpoint.config)
        self.patch_size = one_side(checkpoint.name, "patch_size", config.patch_size)
        self.transform = ImageTransform.from_config(checkpoint.image_config(), settings.pixel_mode)
        self.prefix = 1 + (config.num_register_tokens if with_registers else 0)
        features = "last layer, after the last norm; class token and registers left out"
        self.spec = self.describe_as(checkpoint.model_type, config, features)
        self.module = load_weights(checkpoint, model_class)
        fix_positions(self.module.embeddings, self.transform.output_size, self.patch_size)

    def forward(self, inputs: Inputs) -> TowerOutput:
        found = self.module(pixel_values=inputs["pixel_values"])
        return TowerOutput(found.pooler_output, found.last_hidden_state[:, self.prefix :])


def load_tower(checkpoint: Checkpoint, settings: EngineSettings) -> Tower[Any]:
    """The vision tower of a DINOv2 checkpoint; raises CheckpointError for its text tower."""
    require_vision(checkpoint, settings)
    return Dinov2(checkpoint, settings)
