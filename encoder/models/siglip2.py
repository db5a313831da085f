"""SigLIP2 NaFlex: pictures keep their proportions, positions are resized to each; texts as SigLIP's, in lower case.

transformers pads every picture to the same length and masks the padding, in the pooling head as well. Here pictures
are packed: each attends, and is pooled, within its own segment, so that there is no padding to mask.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import Siglip2Config, Siglip2TextModel, Siglip2VisionConfig, Siglip2VisionModel

from encoder.attention.backend import ITEM_BOUNDARIES, MaskNeed
from encoder.attention.hf import attention
from encoder.errors import CheckpointError
from encoder.models.checkpoint import Checkpoint
from encoder.models.packed import GOLDEN_GRIDS, PATCHES, PLACES, PackedPictures
from encoder.models.siglip import SiglipText
from encoder.models.tower import Inputs, Tower, TowerOutput, TowerSpec
from encoder.models.weights import learned_scale, load_weights
from encoder.preprocess.variable import naflex_transform
from encoder.settings import EngineSettings


class Siglip2Vision(PackedPictures):
    """Pooled by an attention head of its own; features are the last layer's, after the last norm."""

    golden_grids = (*GOLDEN_GRIDS, (9, 7), (16, 16), (13, 19), (11, 10))

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        vision = _vision_config(checkpoint)
        if not vision.vision_use_head:
            raise CheckpointError(f"{checkpoint.name}: it has no pooling head, so it gives no vector for a picture")
        self.patch_size = vision.patch_size
        self.transform = naflex_transform(
            checkpoint.image_config(), settings.pixel_mode, patch=self.patch_size, max_patches=settings.max_patches
        )
        self.spec = TowerSpec(
            family="siglip2",
            tower="vision",
            dimensions=vision.hidden_size,
            head_dims=frozenset({vision.hidden_size // vision.num_attention_heads}),
            mask_needs=frozenset({MaskNeed.SEGMENTS}),
            max_tokens=self.transform.rule.longest,
            logit_scale=learned_scale(checkpoint),
            packed=True,
            token_dimensions=vision.hidden_size,
            token_features="last layer, after the last norm, before the pooling head",
        )
        self.module = load_weights(checkpoint, Siglip2VisionModel, config=vision)

    def by_channel(self, patches: torch.Tensor) -> torch.Tensor:
        return patches.unflatten(1, (-1, 3)).transpose(1, 2)

    def in_patches(self, channels: torch.Tensor) -> torch.Tensor:
        return channels.transpose(1, 2).flatten(1)

    def levels(self, items: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """Patches pixel by pixel, and of each its row, column, and its picture's rows and columns, [T, 4]."""
        patches, places = [], []
        for item in items:
            rows, columns = self.patch_grid(item)
            cut = torch.from_numpy(item).unflatten(2, (columns, -1)).unflatten(1, (rows, -1))
            patches.append(cut.permute(1, 3, 2, 4, 0).flatten(2).flatten(0, 1))
            row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
            size = torch.tensor([rows, columns]).expand(rows * columns, 2)
            places.append(torch.cat([row.reshape(-1, 1), column.reshape(-1, 1), size], dim=1))
        return {PATCHES: torch.cat(patches), PLACES: torch.cat(places), **self.boundaries(items)}

    def forward(self, inputs: Inputs) -> TowerOutput:
        model: Any = self.module
        embeddings = model.embeddings
        positions = resized_positions(embeddings.position_embedding.weight, inputs[PLACES])
        hidden = embeddings.patch_embedding(inputs[PATCHES]) + positions
        hidden = model.encoder(inputs_embeds=hidden[None], attention_mask=None).last_hidden_state
        features = model.post_layernorm(hidden)
        return TowerOutput(self._pool(features, inputs[ITEM_BOUNDARIES]), features[0])

    def _pool(self, features: torch.Tensor, boundaries: torch.Tensor) -> torch.Tensor:
        """[n, D]: the head's probe as the query of every token, so that each segment's first gives its pooled vector.

        That is attention within segments again, which each backend has; one query a segment few of them take.
        """
        head: Any = self.module.head
        heads = head.attention.num_heads
        weights, biases = head.attention.in_proj_weight.chunk(3), head.attention.in_proj_bias.chunk(3)
        query, key, value = (
            F.linear(given, weight, bias).unflatten(-1, (heads, -1)).transpose(1, 2)
            for given, weight, bias in zip((head.probe, features, features), weights, biases, strict=True)
        )
        query = query.expand_as(key).contiguous()
        attended, _ = attention(head, query, key, value, None, is_causal=False)
        # An empty segment begins past the last token; nobody reads its vector.
        first = boundaries[:-1].long().clamp(max=features.shape[1] - 1)
        pooled = head.attention.out_proj(attended[0].flatten(1)[first])
        mixed: torch.Tensor = pooled + head.mlp(head.layernorm(pooled))
        return mixed


class Siglip2Text(SiglipText):
    """As SigLIP's: always padded to its full length, unmasked; pooled at the last position, projected."""

    family = "siglip2"
    config_class = Siglip2Config
    model_class = Siglip2TextModel

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        if checkpoint.model_type != Siglip2Config.model_type:
            raise CheckpointError(f"{checkpoint.name}: it is a vision tower alone and has no text tower")
        super().__init__(checkpoint, settings)


def resized_positions(table: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
    """Position embeddings [T, D] for patches at `places` [T, 4], out of a square table [P * P, D].

    What antialiased bilinear interpolation of the table to each picture's rows and columns gives there (align_corners
    false, as transformers 5.24), computed on the device: an output is the table weighted by its row and its column.
    """
    side = int(table.shape[0] ** 0.5)
    index, size = places[:, :2].float(), places[:, 2:].float().clamp(min=1)  # 0 in the filler
    step = side / size
    centre = (index + 0.5) * step - 0.5
    source = torch.arange(side, device=table.device, dtype=torch.float32)
    weights = (1 - (source - centre[..., None]).abs() / step.clamp(min=1)[..., None]).clamp(min=0)
    weights = weights / weights.sum(-1, keepdim=True)
    outer = (weights[:, 0, :, None] * weights[:, 1, None, :]).flatten(1)
    return (outer @ table.float()).to(table.dtype)


def _vision_config(checkpoint: Checkpoint) -> Any:
    if checkpoint.model_type == Siglip2VisionConfig.model_type:
        return Siglip2VisionConfig.from_dict(checkpoint.config)
    whole: Any = Siglip2Config.from_dict(checkpoint.config)
    return whole.vision_config


def load_tower(checkpoint: Checkpoint, settings: EngineSettings) -> Tower[Any]:
    """The vision or the text tower of a SigLIP2 NaFlex checkpoint."""
    return Siglip2Vision(checkpoint, settings) if settings.tower == "vision" else Siglip2Text(checkpoint, settings)
