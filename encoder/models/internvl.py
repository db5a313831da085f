"""InternViT, the vision tower of InternVL as transformers has it: of a whole model's checkpoint, or alone.

A picture is one view of the model's size; the further views that InternVL's processor can cut out of a large picture
are for its language model. The vector is what transformers states as pooled and does not compute: the mean of the
patches' features where the configuration says `use_mean_pooling`, else the class token's.
"""

from typing import Any

from transformers import InternVLVisionConfig, InternVLVisionModel

from encoder.models.checkpoint import Checkpoint
from encoder.models.halves import one_side
from encoder.models.tower import Inputs, Tower, TowerOutput
from encoder.models.vision_only import VisionOnlyTower, fix_positions, require_vision
from encoder.models.weights import load_weights
from encoder.preprocess.transform import ImageTransform
from encoder.settings import EngineSettings

# Of a whole model's checkpoint the vision tower's weights, by their old and their new name.
VISION_ALONE = {r"^(model\.)?vision_tower\.": ""}
FEATURES = "last layer, before pixel shuffle and the projector to the language model; class token left out"


class InternVit(VisionOnlyTower):
    """Attends to everything, with layer scale and, in the largest, normalised queries and keys."""

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        vision: Any = InternVLVisionConfig.from_dict(checkpoint.config.get("vision_config", checkpoint.config))
        self.patch_size = one_side(checkpoint.name, "patch_size", vision.patch_size)
        self.transform = ImageTransform.from_config(checkpoint.image_config(), settings.pixel_mode)
        self.require_size(checkpoint.name, vision.image_size)
        self.spec = self.describe_as("internvl", vision, FEATURES)
        self.mean_pooling = bool(vision.use_mean_pooling)
        self.module: Any = load_weights(checkpoint, InternVLVisionModel, config=vision, key_mapping=VISION_ALONE)
        if vision.use_absolute_position_embeddings:
            fix_positions(self.module.embeddings, self.transform.output_size, self.patch_size)

    def forward(self, inputs: Inputs) -> TowerOutput:
        hidden = self.module(pixel_values=inputs["pixel_values"]).last_hidden_state
        patches = hidden[:, 1:]
        return TowerOutput(patches.float().mean(dim=1) if self.mean_pooling else hidden[:, 0], patches)


def load_tower(checkpoint: Checkpoint, settings: EngineSettings) -> Tower[Any]:
    """The vision tower of an InternVL checkpoint; raises CheckpointError for its text tower."""
    require_vision(checkpoint, settings)
    return InternVit(checkpoint, settings)
