"""What the vision towers of Qwen2-VL, Qwen2.5-VL and Qwen3-VL share.

Pictures of any size are packed; patches come in blocks of merge x merge, each of which the merger makes one feature.
The layers are transformers' modules, called one by one here: its own forward would cut a batch at its boundaries on
the host, which neither a graph nor a packed kernel can follow. Row and column of each patch come with the batch, and
all that depends on them is computed on the device in float32.
"""

from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
import torch.nn.functional as F
from transformers.models.qwen2_vl.modeling_qwen2_vl import apply_rotary_pos_emb_vision
from transformers.vision_utils import get_vision_position_ids

from encoder.attention.backend import ITEM_BOUNDARIES, MaskNeed
from encoder.attention.hf import attention
from encoder.models.checkpoint import Checkpoint
from encoder.models.packed import PATCHES, PLACES, PackedPictures, segment_means
from encoder.models.tower import Inputs, TowerOutput, TowerSpec, Windows
from encoder.models.vision_only import require_vision
from encoder.models.weights import load_weights
from encoder.preprocess.variable import qwen_transform
from encoder.settings import EngineSettings

# Of a whole model's checkpoint the vision tower's weights, by their old and their new name.
VISUAL_ALONE = {r"^(model\.)?visual\.": ""}


class QwenVision(PackedPictures):
    """Vectors are the mean of a picture's features, this project's own definition: these towers do not pool.

    Features are the merger's, which is what the language model takes.
    """

    family: ClassVar[str]
    config_class: ClassVar[Any]
    model_class: ClassVar[Any]
    windows: Windows | None = None

    def __init__(self, checkpoint: Checkpoint, settings: EngineSettings) -> None:
        require_vision(checkpoint, settings)
        vision = self.read_config(checkpoint)
        self.patch_size, self.merge, self.frames = (
            vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size,
        )  # fmt: skip
        self.theta = float(vision.rope_parameters["rope_theta"])
        self.head_dim = self.width(vision) // vision.num_heads
        self.transform = qwen_transform(
            checkpoint.image_config(),
            settings.pixel_mode,
            patch=self.patch_size,
            merge=self.merge,
            frames=self.frames,
            max_patches=settings.max_patches,
        )
        self.prepare_layers(vision)
        dimensions = self.dimensions(vision)
        self.spec = TowerSpec(
            family=self.family,
            tower="vision",
            dimensions=dimensions,
            head_dims=frozenset({self.head_dim}),
            mask_needs=frozenset({MaskNeed.SEGMENTS}),
            max_tokens=self.transform.rule.longest,
            packed=True,
            token_multiple=self.merge**2,
            token_dimensions=dimensions,
            token_features=self.describe_features(),
            windows=self.windows,
            vision_only=True,
        )
        self.module = load_weights(checkpoint, self.model_class, config=vision, key_mapping=VISUAL_ALONE)

    @staticmethod
    def width(vision: Any) -> int:
        """Of the layers."""
        return int(vision.hidden_size)

    @staticmethod
    def dimensions(vision: Any) -> int:
        """Of the merger's features."""
        return int(vision.out_hidden_size)

    @classmethod
    def read_config(cls, checkpoint: Checkpoint) -> Any:
        """The vision tower's, of a whole model's checkpoint or of one that holds the tower alone."""
        return cls.config_class.from_dict(checkpoint.config.get("vision_config", checkpoint.config))

    def prepare_layers(self, vision: Any) -> None:
        """What a family reads of its configuration before the weights are loaded."""

    def describe_features(self) -> str:
        """What the features are."""
        return f"the merger's output, one feature for {self.merge} x {self.merge} patches, as the language model has it"

    def boundaries_of(self, layer: int) -> str:
        """The boundaries that a layer attends by."""
        return ITEM_BOUNDARIES

    def embed(self, inputs: Inputs) -> torch.Tensor:
        """Patches [T, 3 * p * p] as the first layer takes them, [T, width]: a picture is its own next frame."""
        model: Any = self.module
        projection = model.patch_embed.proj
        patches = inputs[PATCHES]
        frames = patches.unflatten(1, (-1, 1, self.patch_size**2)).expand(-1, -1, self.frames, -1).flatten(1)
        return F.linear(frames, projection.weight.flatten(1), projection.bias)

    def in_order(self, features: torch.Tensor, inputs: Inputs) -> torch.Tensor:
        """Features [T / merge², D] in the order of the pictures' rows and columns."""
        return features

    def levels(self, items: Sequence[np.ndarray]) -> dict[str, torch.Tensor]:
        """Patches channel by channel, and of each its row, column, and its picture's rows and columns, [T, 4]."""
        patches, places = [], []
        for item in items:
            rows, columns = self.patch_grid(item)
            block, side = self.merge, self.patch_size
            cut = torch.from_numpy(item).reshape(-1, rows // block, block, side, columns // block, block, side)
            patches.append(cut.permute(1, 4, 2, 5, 0, 3, 6).reshape(rows * columns, -1))
            grid = torch.tensor([[1, rows, columns]])
            size = torch.tensor([rows, columns]).expand(rows * columns, 2)
            places.append(torch.cat([get_vision_position_ids(grid, block), size], dim=1))
        return {PATCHES: torch.cat(patches), PLACES: torch.cat(places), **self.boundaries(items)}

    def forward(self, inputs: Inputs) -> TowerOutput:
        model: Any = self.module
        hidden = self.embed(inputs)
        cos, sin = rotation(inputs[PLACES], self.head_dim, self.theta)
        for layer, block in enumerate(model.blocks):
            hidden = hidden + self._attend(block.attn, block.norm1(hidden), cos, sin, self.boundaries_of(layer))
            hidden = hidden + block.mlp(block.norm2(hidden))
        features = model.merger(hidden)
        ends = inputs[ITEM_BOUNDARIES] // self.merge**2
        return TowerOutput(segment_means(features, ends), self.in_order(features, inputs))

    def _attend(
        self, layer: Any, hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, boundaries: str
    ) -> torch.Tensor:
        """[T, width] of [T, width]."""
        query, key, value = layer.qkv(hidden).unflatten(-1, (3, -1, self.head_dim)).unbind(1)
        query, key = apply_rotary_pos_emb_vision(query, key, cos, sin)
        query, key, value = (part.transpose(0, 1)[None] for part in (query, key, value))
        attended, _ = attention(layer, query, key, value, None, is_causal=False, boundaries=boundaries)
        out: torch.Tensor = layer.proj(attended[0].flatten(1))
        return out


def rotation(places: torch.Tensor, head_dim: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines float32 [T, head_dim] of the angles for rows and columns in `places` [T, 4 or 2].

    Computed anew for each batch: a buffer of frequencies would be rounded with the weights, and positions with it.
    """
    part = head_dim // 2
    steps = torch.arange(0, part, 2, device=places.device, dtype=torch.float32)
    angles = (places[:, :2, None].float() / theta ** (steps / part)).flatten(1)
    angles = torch.cat([angles, angles], dim=-1)
    return angles.cos(), angles.sin()
