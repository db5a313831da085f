"""Mllama's vision tower (Llama 3.2 Vision): a picture is up to four tiles, those that it does not fill are masked.

The mask is of a kind of its own: tokens of padding do not see each other, but what is real sees everything, padding
too. So it is no key padding, and a kernel that takes no dense mask cannot serve this tower. It is kept boolean here;
transformers makes a float one of it, which accelerators compute slowly.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import MllamaVisionModel
from transformers.models.mllama.configuration_mllama import MllamaVisionConfig

from encoder.attention.backend import MaskNeed
from encoder.errors import CheckpointError
from encoder.golden import golden_pictures
from encoder.models.checkpoint import Checkpoint
from encoder.models.halves import VisionTower, one_side
from encoder.models.tower import Inputs, Tower, TowerOutput, TowerSpec
from encoder.models.vision_only import require_vision
from encoder.models.weights import load_weights
from encoder.preprocess.tiles import TiledPicture, tile_transform
from encoder.settings import EngineSettings

# Of a whole model's checkpoint the vision tower's weights, by their old and their new name.
VISION_ALONE = {r"^(model\.)?vision_model\.": ""}
FEATURES = "last layer beside five middle ones, before the projector; real tiles only, class tokens left out"
# A tile's tokens are filled up to a multiple of this.
TOKENS_MULTIPLE = 8


class MllamaVision(VisionTower[TiledPicture]):
    """Vectors are the mean of the real tiles' features, this project's own definition: the tower does not pool."""

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        vision: Any = MllamaVisionConfig.from_dict(checkpoint.config.get("vision_config", checkpoint.config))
        self.side = one_side(checkpoint.name, "image_size", vision.image_size)
        self.patches = self.side // one_side(checkpoint.name, "patch_size", vision.patch_size)
        self.most: int = vision.max_num_tiles
        self.transform = tile_transform(checkpoint.image_config(), settings.pixel_mode, side=self.side, most=self.most)
        if self.transform.arrangements != [tuple(ratio) for ratio in vision.supported_aspect_ratios]:
            raise CheckpointError(f"{checkpoint.name}: supported_aspect_ratios are not those of {self.most} tiles")
        self.middle = list(vision.intermediate_layers_indices)
        width = vision.hidden_size * (1 + len(self.middle))
        self.spec = TowerSpec(
            family="mllama",
            tower="vision",
            dimensions=width,
            head_dims=frozenset({vision.hidden_size // vision.attention_heads}),
            mask_needs=frozenset({MaskNeed.ADDITIVE}),
            token_dimensions=width,
            token_features=FEATURES,
            item_tokens=self.most * (self.patches**2 + 1),
            vision_only=True,
        )
        self.module: Any = load_weights(checkpoint, MllamaVisionModel, config=vision, key_mapping=VISION_ALONE)

    def prepare(self, pixels: np.ndarray) -> TiledPicture:
        return self.transform.cut(pixels)

    def grid_of(self, item: TiledPicture) -> tuple[int, ...]:
        """Tiles, row by row, then rows and columns within each."""
        return len(item.tiles), self.patches, self.patches

    def collate(self, items: Sequence[TiledPicture], *, length: int | None = None) -> dict[str, torch.Tensor]:
        """Tiles float32 [n, most, 3, side, side], zeros where none is; ids int64 [n, 1]; which are real [n, most]."""
        pixels = torch.zeros(len(items), self.most, 3, self.side, self.side)
        real = torch.zeros(len(items), self.most, dtype=torch.int64)
        for row, item in enumerate(items):
            pixels[row, : len(item.tiles)] = torch.from_numpy(self.transform.pixels.normalize(item.tiles))
            real[row, : len(item.tiles)] = 1
        ids = torch.tensor([[self.transform.ratio_id(item)] for item in items])
        return {"pixel_values": pixels, "aspect_ratio_ids": ids, "aspect_ratio_mask": real}

    def forward(self, inputs: Inputs) -> TowerOutput:
        model, ids, real = self.module, inputs["aspect_ratio_ids"], inputs["aspect_ratio_mask"]
        patches = model.patch_embedding(inputs["pixel_values"].flatten(0, 1)).flatten(2).transpose(1, 2)
        hidden = model.pre_tile_positional_embedding(patches.unflatten(0, (-1, self.most)), ids)
        first = model.class_embedding.expand(*hidden.shape[:2], 1, -1)
        hidden = model.gated_positional_embedding(torch.cat([first, hidden], dim=2), ids)
        tokens = self.patches**2 + 1
        hidden = F.pad(model.layernorm_pre(hidden), (0, 0, 0, -tokens % TOKENS_MULTIPLE))
        seen = self.seen(real, tokens, hidden.shape[2])
        hidden, middle = hidden.flatten(1, 2), {}
        for place, layer in enumerate(model.transformer.layers):
            hidden = layer(hidden, attention_mask=seen)
            if place in self.middle:
                middle[place] = hidden
        hidden = model.layernorm_post(hidden).unflatten(1, (self.most, -1))
        hidden = model.post_tile_positional_embedding(hidden, ids).flatten(1, 2)
        for layer in model.global_transformer.layers:
            hidden = layer(hidden, attention_mask=seen)
        # The middle layers' features stand side by side, component by component, as the projector expects them.
        beside = torch.stack([middle[place] for place in self.middle], dim=-1).flatten(2)
        features = torch.cat([hidden, beside], dim=-1)
        features = features.unflatten(1, (self.most, -1))[:, :, 1:tokens]
        weights = real.float() / real.sum(dim=1, keepdim=True)
        vectors = (features.float().mean(dim=2) * weights[..., None]).sum(dim=1)
        return TowerOutput(vectors, features.flatten(1, 2))

    def seen(self, real: torch.Tensor, tokens: int, padded: int) -> torch.Tensor:
        """Boolean [n, 1, S, S], True = attend, of tiles that are `real` [n, most] with `tokens` of `padded` tokens."""
        place = torch.arange(padded, device=real.device)
        known = ((real[..., None] > 0) & (place < tokens)).flatten(1)
        return (known[:, :, None] | known[:, None, :])[:, None]

    def golden_items(self) -> list[TiledPicture]:
        """One tile, and a canvas that leaves a tile empty; few, as each is thousands of tokens."""
        sizes = ((self.side, self.side), (self.side, 2 * self.side + self.side // 2))
        pictures = (golden_pictures(*size)[place] for place, size in enumerate(sizes))
        return [self.transform.cut(np.ascontiguousarray(picture.transpose(1, 2, 0))) for picture in pictures]

    def describe_preprocessing(self) -> dict[str, Any]:
        return self.transform.describe()


def load_tower(checkpoint: Checkpoint, settings: EngineSettings) -> Tower[Any]:
    """The vision tower of a Mllama checkpoint; raises CheckpointError for its text tower."""
    require_vision(checkpoint, settings)
    return MllamaVision(checkpoint, settings)
