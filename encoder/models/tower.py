"""A tower: one half of a model, ready to be called with batches; and the registry of families that make them."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from typing import Any, Generic, NamedTuple, TypeVar

import torch

from encoder.attention.backend import MaskNeed
from encoder.errors import CheckpointError
from encoder.models.checkpoint import Checkpoint
from encoder.settings import EngineSettings, TowerName

Item = TypeVar("Item")
Inputs = Mapping[str, torch.Tensor]


class TowerOutput(NamedTuple):
    """What a forward gives: `vectors` [n, dimensions], pooled and projected, and the features of the patches.

    `tokens` is [n, t, token_dimensions], without class and register tokens, or for a packed tower
    [t, token_dimensions], the items' one after the other; None for a tower that has none to give, as texts.
    """

    vectors: torch.Tensor
    tokens: torch.Tensor | None = None


@dataclass(frozen=True)
class Windows:
    """How those layers of a packed tower that attend by windows cut a batch.

    `longest`: the most tokens in a window. `share`: T tokens in n items make at most T / share + n windows.
    """

    longest: int
    share: int

    def most(self, tokens: int, items: int) -> int:
        """The most windows that so many tokens in so many items make."""
        return tokens // self.share + items


@dataclass(frozen=True)
class TowerSpec:
    """What a tower is: `dimensions` of its vectors, head dims of its layers, mask needs of its calls.

    `max_tokens`: longest text with special tokens, 0 for vision; with `fixed_length` every text has it.
    `logit_scale`: what cosines are multiplied by before a softmax over labels, 0 when the model has learned none.
    `packed`: items have their own token counts, up to `max_tokens`, and a batch is one row of tokens; see `Tower`.
    `token_dimensions`: components of a patch's features, 0 when the tower gives none. `token_features`: what they are.
    `token_multiple`: what the token counts of packed items are multiples of. `windows`: of a packed tower's layers.
    `item_tokens`: of a picture of one size, where they are so many that budgets for tokens limit its batches; else 0.
    `vision_only`: the architecture has no text tower at all.
    """

    family: str
    tower: TowerName
    dimensions: int
    head_dims: frozenset[int]
    mask_needs: frozenset[MaskNeed]
    max_tokens: int = 0
    fixed_length: bool = False
    logit_scale: float = 0.0
    packed: bool = False
    token_dimensions: int = 0
    token_features: str = ""
    token_multiple: int = 1
    windows: Windows | None = None
    item_tokens: int = 0
    vision_only: bool = False


class Tower(ABC, Generic[Item]):
    """One tower of one checkpoint with its preprocessing.

    `module` holds the weights, loaded in float32 on the CPU with the project's attention name.

    A packed tower (`spec.packed`) keeps to this: `length_of` is an item's token count; `collate` gives the items one
    after the other, tensors [T, ...] and `cu_seqlens` int32 [n + 1], cumulative from 0 to T, and is asked for no
    length; `forward` gives a vector for each segment, [n, dimensions], and features in the order of the items, attends
    by the segments that the dispatcher holds, and bears segments of zeros (filler) and of no token, whose vectors
    nobody reads. With `spec.windows`, `collate` gives `cu_window_seqlens` int32 [m + 1] as well, and layers may name
    those as the boundaries that they attend by.
    """

    spec: TowerSpec
    module: torch.nn.Module

    @abstractmethod
    def collate(self, items: Sequence[Item], *, length: int | None = None) -> dict[str, torch.Tensor]:
        """Host tensors of a batch, first dimension the batch; texts padded to `length` tokens, or the longest."""

    def gather(self, items: Sequence[Item], *, length: int | None = None) -> dict[str, torch.Tensor]:
        """As `collate`, with as little done as the host has to do: `finish` does the rest where the model is."""
        return self.collate(items, length=length)

    def finish(self, inputs: Inputs, *, alone: bool = False) -> dict[str, torch.Tensor]:
        """What `gather` has left to do, in float32, on whatever device the inputs are; those of `collate` stay as is.

        Gives the same bits everywhere: what it does to a number are single operations that IEEE 754 rounds. alone: in
        this thread and no other; for inputs on the host, and never while a graph is recorded.
        """
        return dict(inputs)

    def length_of(self, item: Item) -> int:
        """Tokens of an item, by which its bucket is chosen; 0 where all items have one size, as pictures do."""
        return 0

    def grid_of(self, item: Item) -> tuple[int, ...]:
        """Shape of an item's patch features: rows and columns, with frames or tiles before them where there are some.

        Their product is the item's number of features; empty where the tower gives none.
        """
        return ()

    @abstractmethod
    def forward(self, inputs: Inputs) -> TowerOutput:
        """See `TowerOutput`; inputs on the module's device, floats in its dtype."""

    @abstractmethod
    def golden_items(self) -> list[Item]:
        """A few inputs made by formula, for the self-check and the health probe."""

    @abstractmethod
    def describe_preprocessing(self) -> dict[str, Any]:
        """The exact preprocessing, JSON-ready; part of the fingerprint."""


FAMILIES: dict[str, str] = {
    "aimv2": "encoder.models.aimv2:load_tower",
    "aimv2_vision_model": "encoder.models.aimv2:load_tower",
    "clip": "encoder.models.clip:load_tower",
    "dinov2": "encoder.models.dinov2:load_tower",
    "dinov2_with_registers": "encoder.models.dinov2:load_tower",
    "dinov3_vit": "encoder.models.dinov3:load_tower",
    "internvl": "encoder.models.internvl:load_tower",
    "internvl_vision": "encoder.models.internvl:load_tower",
    "metaclip_2": "encoder.models.metaclip_2:load_tower",
    "mllama": "encoder.models.mllama:load_tower",
    "mllama_vision_model": "encoder.models.mllama:load_tower",
    "qwen2_5_vl": "encoder.models.qwen2_5_vl:load_tower",
    "qwen2_5_vl_vision": "encoder.models.qwen2_5_vl:load_tower",
    "qwen2_vl": "encoder.models.qwen2_vl:load_tower",
    "qwen2_vl_vision": "encoder.models.qwen2_vl:load_tower",
    "qwen3_vl": "encoder.models.qwen3_vl:load_tower",
    "qwen3_vl_vision": "encoder.models.qwen3_vl:load_tower",
    "siglip": "encoder.models.siglip:load_tower",
    "siglip2": "encoder.models.siglip2:load_tower",
    "siglip2_vision_model": "encoder.models.siglip2:load_tower",
    "timm_wrapper": "encoder.models.timm_wrapper:load_tower",
    "vit": "encoder.models.vit:load_tower",
}


def load_tower(checkpoint: Checkpoint, settings: EngineSettings) -> Tower[Any]:
    """The tower that the settings name; raises CheckpointError for an architecture that no family here serves."""
    target = FAMILIES.get(checkpoint.model_type)
    if target is None:
        raise CheckpointError(
            f"{checkpoint.name}: architecture {checkpoint.model_type or 'unnamed'!r} is not served: "
            f"use a checkpoint of {', '.join(sorted(FAMILIES))}"
        )
    module, _, attribute = target.partition(":")
    tower: Tower[Any] = getattr(import_module(module), attribute)(checkpoint, settings)
    return tower
