"""What the families without a text half share."""

from collections.abc import Callable
from typing import Any

import torch

from encoder.attention.backend import MaskNeed
from encoder.errors import CheckpointError
from encoder.models.checkpoint import Checkpoint
from encoder.models.halves import PictureTower
from encoder.models.tower import TowerSpec
from encoder.settings import EngineSettings


class VisionOnlyTower(PictureTower):
    """A tower for pictures of a model that has none for texts: vectors are as long as the layers are wide."""

    def describe_as(self, family: str, config: Any, features: str) -> TowerSpec:
        """The spec of a plain ViT: full attention, no projection."""
        return TowerSpec(
            family=family,
            tower="vision",
            dimensions=config.hidden_size,
            head_dims=frozenset({config.hidden_size // config.num_attention_heads}),
            mask_needs=frozenset({MaskNeed.NONE}),
            token_dimensions=config.hidden_size,
            token_features=features,
            vision_only=True,
        )


def require_vision(checkpoint: Checkpoint, settings: EngineSettings) -> None:
    """Raises CheckpointError when the settings ask for the text tower of a model that has none."""
    if settings.tower != "vision":
        raise CheckpointError(
            f"{checkpoint.name}: architecture {checkpoint.model_type!r} is for pictures alone and has no text tower: "
            "set tower to vision"
        )


def fix_positions(embeddings: Any, size: tuple[int, int], patch_size: int) -> None:
    """Has an embedding module compute its positions for pictures of `size` (height, width) once, in float32.

    They are the module's own, interpolated as it does itself. Every picture has that size, and neither a graph nor a
    half-precision forward needs to resample them.
    """
    height, width = size
    patches = (height // patch_size) * (width // patch_size)
    like = torch.empty(1, 1 + patches, embeddings.position_embeddings.shape[-1])
    with torch.no_grad():
        positions = embeddings.interpolate_pos_encoding(like, height, width).clone()
    embeddings.register_buffer("fixed_positions", positions, persistent=False)
    embeddings.interpolate_pos_encoding = _fixed(embeddings)


def _fixed(embeddings: Any) -> Callable[[torch.Tensor, int, int], torch.Tensor]:
    def positions(patches: torch.Tensor, height: int, width: int) -> torch.Tensor:
        found: torch.Tensor = embeddings.fixed_positions
        return found

    return positions
