"""ViT as transformers has it (google/vit-*, facebook/dino-*).

The vector is the class token after the last norm, which is what `ViTForImageClassification` puts its classifier on and
what DINO is compared by. The pooler (a dense layer and tanh over it) is left out: most checkpoints have no weights for
it, and transformers would make some up.
"""

from typing import Any

from transformers import ViTConfig, ViTModel

from encoder.models.checkpoint import Checkpoint
from encoder.models.halves import one_side
from encoder.models.tower import Inputs, Tower, TowerOutput
from encoder.models.vision_only import VisionOnlyTower, require_vision
from encoder.models.weights import load_weights
from encoder.preprocess.transform import ImageTransform
from encoder.settings import EngineSettings


class Vit(VisionOnlyTower):
    """Pooled at the class token, after the last norm; features are the patches', after that norm too."""

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        config: Any = ViTConfig.from_dict(checkpoint.config)
        self.patch_size = one_side(checkpoint.name, "patch_size", config.patch_size)
        self.transform = ImageTransform.from_config(checkpoint.image_config(), settings.pixel_mode)
        self.require_size(checkpoint.name, config.image_size)
        self.spec = self.describe_as("vit", config, "last layer, after the last norm; class token left out")
        self.module = load_weights(checkpoint, ViTModel, arguments={"add_pooling_layer": False})

    def forward(self, inputs: Inputs) -> TowerOutput:
        hidden = self.module(pixel_values=inputs["pixel_values"]).last_hidden_state
        return TowerOutput(hidden[:, 0], hidden[:, 1:])


def load_tower(checkpoint: Checkpoint, settings: EngineSettings) -> Tower[Any]:
    """The vision tower of a ViT checkpoint; raises CheckpointError for its text tower."""
    require_vision(checkpoint, settings)
    return Vit(checkpoint, settings)
