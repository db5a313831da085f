"""The CLIP family: vision attends to everything, text is causal and padded, pooled at the end-of-text token."""

from typing import Any

from transformers import CLIPConfig, CLIPTextModelWithProjection, CLIPVisionModelWithProjection

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

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        config: Any = CLIPConfig.from_dict(checkpoint.config)
        vision = config.vision_config
        self.transform = ImageTransform.from_config(checkpoint.image_config(), settings.preprocess)
        self.spec = TowerSpec(
            family="clip",
            tower="vision",
            dimensions=config.projection_dim,
            head_dims=frozenset({vision.hidden_size // vision.num_attention_heads}),
            mask_needs=frozenset({MaskNeed.NONE}),
            logit_scale=learned_scale(checkpoint),
            token_dimensions=vision.hidden_size,
            token_features="last layer, before the class token's norm, not projected; class token left out",
        )
        self.patch_size = vision.patch_size
        self.module = load_weights(checkpoint, CLIPVisionModelWithProjection)

    def forward(self, inputs: Inputs) -> TowerOutput:
        found = self.module(pixel_values=inputs["pixel_values"])
        return TowerOutput(found.image_embeds, found.last_hidden_state[:, 1:])


class ClipText(TextTower):
    """Causal, with padding masked; pooled at the end-of-text token, projected."""

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        config: Any = CLIPConfig.from_dict(checkpoint.config)
        text = config.text_config
        self.spec = TowerSpec(
            family="clip",
            tower="text",
            dimensions=config.projection_dim,
            head_dims=frozenset({text.hidden_size // text.num_attention_heads}),
            mask_needs=frozenset({MaskNeed.CAUSAL, MaskNeed.KEY_PADDING}),
            max_tokens=text.max_position_embeddings,
            logit_scale=learned_scale(checkpoint),
        )
        self.pipeline = TextPipeline.from_folder(checkpoint.folder, text.max_position_embeddings)
        self.pipeline.check_vocabulary(checkpoint.name, text.vocab_size)
        self.module = load_weights(checkpoint, CLIPTextModelWithProjection)

    def forward(self, inputs: Inputs) -> TowerOutput:
        found = self.module(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"])
        return TowerOutput(found.text_embeds)


def load_tower(checkpoint: Checkpoint, settings: EngineSettings) -> Tower[Any]:
    """The vision or the text tower of a CLIP-layout checkpoint."""
    return ClipVision(checkpoint, settings) if settings.tower == "vision" else ClipText(checkpoint, settings)
