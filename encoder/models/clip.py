"""The CLIP family: vision attends to everything, text is causal and padded, pooled at the end-of-text token."""

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from transformers import CLIPConfig, CLIPTextModelWithProjection, CLIPVisionModelWithProjection

from encoder.attention.backend import MaskNeed
from encoder.errors import CheckpointError
from encoder.golden import golden_pictures, golden_texts
from encoder.models.checkpoint import Checkpoint
from encoder.models.tower import Inputs, Tower, TowerSpec
from encoder.models.weights import load_weights, read_scalar
from encoder.preprocess.text import TextPipeline, TokenizedText
from encoder.preprocess.transform import ImageTransform
from encoder.settings import EngineSettings


class ClipVision(Tower[np.ndarray]):
    """Items are uint8 pixels [3, H, W], resized and cropped."""

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
            logit_scale=_logit_scale(checkpoint),
        )
        self.module = load_weights(checkpoint, CLIPVisionModelWithProjection)

    def collate(self, items: Sequence[np.ndarray], *, length: int | None = None) -> dict[str, torch.Tensor]:
        return {"pixel_values": torch.from_numpy(self.transform.normalize(np.stack(items)))}

    def forward(self, inputs: Inputs) -> torch.Tensor:
        vectors: torch.Tensor = self.module(pixel_values=inputs["pixel_values"]).image_embeds
        return vectors

    def golden_items(self) -> list[np.ndarray]:
        return golden_pictures(*self.transform.output_size)

    def describe_preprocessing(self) -> dict[str, Any]:
        return self.transform.describe()


class ClipText(Tower[TokenizedText]):
    """Items are tokenised texts. The padding mask goes in as [n, 1, 1, L]; the causal part comes from the model."""

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
            logit_scale=_logit_scale(checkpoint),
        )
        self.pipeline = TextPipeline.from_folder(checkpoint.folder, text.max_position_embeddings)
        if self.pipeline.vocabulary_size > text.vocab_size:
            raise CheckpointError(
                f"{checkpoint.name}: its tokenizer knows {self.pipeline.vocabulary_size} tokens, its model "
                f"{text.vocab_size}: they do not belong together"
            )
        self.module = load_weights(checkpoint, CLIPTextModelWithProjection)

    def collate(self, items: Sequence[TokenizedText], *, length: int | None = None) -> dict[str, torch.Tensor]:
        batch = self.pipeline.collate(list(items), pad_to=length)
        return {
            "input_ids": torch.from_numpy(batch.input_ids),
            "attention_mask": torch.from_numpy(batch.attention_mask).bool()[:, None, None, :],
        }

    def forward(self, inputs: Inputs) -> torch.Tensor:
        # Four dimensions make transformers hand the mask on as it is; is_causal it adds by itself.
        vectors: torch.Tensor = self.module(
            input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"]
        ).text_embeds
        return vectors

    def golden_items(self) -> list[TokenizedText]:
        encode = partial(self.pipeline.encode, overflow="truncate")
        return [encode(text) for text in golden_texts()]

    def describe_preprocessing(self) -> dict[str, Any]:
        return self.pipeline.describe()


def _logit_scale(checkpoint: Checkpoint) -> float:
    """CLIP learns the logarithm of its scale."""
    learned = read_scalar(checkpoint, "logit_scale")
    return 0.0 if learned is None else math.exp(learned)


def load_tower(checkpoint: Checkpoint, settings: EngineSettings) -> Tower[Any]:
    """The vision or the text tower of a CLIP-layout checkpoint."""
    return ClipVision(checkpoint, settings) if settings.tower == "vision" else ClipText(checkpoint, settings)
