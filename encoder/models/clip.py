"""The CLIP family: vision attends to everything, text is causal and padded, pooled at the end-of-text token.

Which token that is, is the checkpoint's own rule (transformers 5.24, `CLIPTextModel`): the first `eos_token_id`; or,
where config.json says 2 as it did before the id was put right (transformers #24773), the highest id of the text.
"""

from typing import Any

from transformers import (
    CLIPConfig,
    CLIPTextModelWithProjection,
    CLIPVisionModelWithProjection,
    PreTrainedConfig,
)

from encoder.attention.backend import MaskNeed
from encoder.models.checkpoint import Checkpoint
from encoder.models.halves import PictureTower, TextTower
from encoder.models.tower import Inputs, Tower, TowerOutput, TowerSpec
from encoder.models.weights import learned_scale, load_weights
from encoder.preprocess.text import TextPipeline
from encoder.preprocess.transform import ImageTransform
from encoder.settings import EngineSettings


class ClipVision(PictureTower):
    """Pooled at the class token, projected; features are the last layer's, before the class token's norm."""

    family = "clip"
    config_class: type[PreTrainedConfig] = CLIPConfig
    model_class: type[Any] = CLIPVisionModelWithProjection

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        config: Any = self.config_class.from_dict(checkpoint.config)
        vision = half_config(config.vision_config, config.projection_dim)
        self.patch_size = vision.patch_size
        self.transform = ImageTransform.from_config(checkpoint.image_config(), settings.pixel_mode)
        self.require_size(checkpoint.name, vision.image_size)
        self.spec = TowerSpec(
            family=self.family,
            tower="vision",
            dimensions=config.projection_dim,
            head_dims=frozenset({vision.hidden_size // vision.num_attention_heads}),
            mask_needs=frozenset({MaskNeed.NONE}),
            logit_scale=learned_scale(checkpoint),
            token_dimensions=vision.hidden_size,
            token_features="last layer, before the class token's norm, not projected; class token left out",
        )
        self.module = load_weights(checkpoint, self.model_class, config=vision)

    def forward(self, inputs: Inputs) -> TowerOutput:
        found = self.module(pixel_values=inputs["pixel_values"])
        return TowerOutput(found.image_embeds, found.last_hidden_state[:, 1:])


class ClipText(TextTower):
    """Causal, with padding masked; pooled at the end-of-text token, projected."""

    family = "clip"
    config_class: type[PreTrainedConfig] = CLIPConfig
    model_class: type[Any] = CLIPTextModelWithProjection

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        config: Any = self.config_class.from_dict(checkpoint.config)
        text = half_config(config.text_config, config.projection_dim)
        self.spec = TowerSpec(
            family=self.family,
            tower="text",
            dimensions=config.projection_dim,
            head_dims=frozenset({text.hidden_size // text.num_attention_heads}),
            mask_needs=frozenset({MaskNeed.CAUSAL, MaskNeed.KEY_PADDING}),
            max_tokens=text.max_position_embeddings,
            logit_scale=learned_scale(checkpoint),
        )
        self.pipeline = TextPipeline.from_folder(checkpoint.folder, text.max_position_embeddings)
        self.pipeline.check_vocabulary(checkpoint.name, text.vocab_size)
        self.module = load_weights(checkpoint, self.model_class, config=text)

    def forward(self, inputs: Inputs) -> TowerOutput:
        found = self.module(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        return TowerOutput(found.text_embeds)


def half_config(half: Any, projection_dim: int) -> Any:
    """A half's configuration with the projection of the whole: that is the one the whole model has been saved with."""
    half.projection_dim = projection_dim
    return half


def load_tower(checkpoint: Checkpoint, settings: EngineSettings) -> Tower[Any]:
    """The vision or the text tower of a CLIP-layout checkpoint."""
    return ClipVision(checkpoint, settings) if settings.tower == "vision" else ClipText(checkpoint, settings)
