"""The SigLIP family: both towers attend to everything; texts are always padded to their full length, unmasked.

The model was trained with padding that it sees: a pad mask would change the vectors (open_clip #984).
"""

from typing import Any

from transformers import SiglipConfig, SiglipTextModel, SiglipVisionModel

from encoder.attention.backend import MaskNeed
from encoder.models.checkpoint import Checkpoint
from encoder.models.halves import PictureTower, TextTower
from encoder.models.tower import Inputs, Tower, TowerOutput, TowerSpec
from encoder.models.weights import learned_scale, load_weights
from encoder.preprocess.text import TextPipeline
from encoder.preprocess.transform import ImageTransform
from encoder.settings import EngineSettings


class SiglipVision(PictureTower):
    """Pooled by an attention head of its own; features are the last layer's, after the last norm."""

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        config: Any = SiglipConfig.from_dict(checkpoint.config)
        vision = config.vision_config
        self.patch_size = vision.patch_size
        self.transform = ImageTransform.from_config(checkpoint.image_config(), settings.pixel_mode)
        self.require_size(checkpoint.name, vision.image_size)
        self.spec = TowerSpec(
            family="siglip",
            tower="vision",
            dimensions=vision.hidden_size,
            head_dims=frozenset({vision.hidden_size // vision.num_attention_heads}),
            mask_needs=frozenset({MaskNeed.NONE}),
            logit_scale=learned_scale(checkpoint),
            token_dimensions=vision.hidden_size,
            token_features="last layer, after the last norm, before the pooling head",
        )
        self.module = load_weights(checkpoint, SiglipVisionModel)

    def forward(self, inputs: Inputs) -> TowerOutput:
        found = self.module(pixel_values=inputs["pixel_values"])
        return TowerOutput(found.pooler_output, found.last_hidden_state)


class SiglipText(TextTower):
    """Pooled at the last position, projected."""

    family = "siglip"
    config_class: Any = SiglipConfig
    model_class: Any = SiglipTextModel

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        text = self.config_class.from_dict(checkpoint.config).text_config
        self.spec = TowerSpec(
            family=self.family,
            tower="text",
            dimensions=text.projection_size,
            head_dims=frozenset({text.hidden_size // text.num_attention_heads}),
            mask_needs=frozenset({MaskNeed.NONE}),
            max_tokens=text.max_position_embeddings,
            fixed_length=True,
            logit_scale=learned_scale(checkpoint),
        )
        self.pipeline = TextPipeline.from_folder(checkpoint.folder, text.max_position_embeddings, "max_length")
        self.pipeline.check_vocabulary(checkpoint.name, text.vocab_size)
        self.module = load_weights(checkpoint, self.model_class)

    def forward(self, inputs: Inputs) -> TowerOutput:
        return TowerOutput(self.module(input_ids=inputs["input_ids"]).pooler_output)


def load_tower(checkpoint: Checkpoint, settings: EngineSettings) -> Tower[Any]:
    """The vision or the text tower of a SigLIP checkpoint."""
    return SiglipVision(checkpoint, settings) if settings.tower == "vision" else SiglipText(checkpoint, settings)
