"""A small family of packed towers, as one from outside the project would be: pictures of any number of patches.

`write_packed` makes a checkpoint of it, `FAMILY` is its line for the registry, and `alone` is its own reference: one
item at a time, attention written out, nothing of the project's.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from encoder.attention.backend import MaskNeed
from encoder.attention.hf import attention
from encoder.models.checkpoint import Checkpoint
from encoder.models.tower import Inputs, Tower, TowerOutput, TowerSpec
from encoder.settings import EngineSettings

FAMILY = {"packed-test": "tests.support.packed_tower:load_tower"}
PATCH = 12
LAYERS = 3
HEADS = 2
OUT = 32
GOLDEN_LENGTHS = (7, 12, 3, 16)


class Attention(nn.Module):
    """Attention as transformers' models call it: [B, H, S, D] in, [B, S, H, D] out."""

    is_causal = False

    def __init__(self, width: int) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))

    def heads(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Queries, keys and values [B, H, S, D] of [B, S, width]."""
        return [p(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for p in (self.query, self.key, self.value)]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.heads(x)
        attended, _ = attention(self, query, key, value, None, scaling=query.shape[-1] ** -0.5, dropout=0.0)
        out: torch.Tensor = self.out(attended.flatten(2))
        return out


class Layer(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.before, self.between = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.before(x))
        out: torch.Tensor = x + self.mlp(self.between(x))
        return out


class PackedVit(nn.Module):
    """Patches [T, PATCH] and their places [T] to a vector for each segment: the mean of its tokens, projected.

    The tokens [T, width] are its features.
    """

    def __init__(self, head_dim: int, max_tokens: int) -> None:
        super().__init__()
        width = HEADS * head_dim
        self.embed, self.places = nn.Linear(PATCH, width), nn.Embedding(max_tokens, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(LAYERS))
        self.after, self.project = nn.LayerNorm(width), nn.Linear(width, OUT, bias=False)

    def forward(self, patches: torch.Tensor, places: torch.Tensor, cu_seqlens: torch.Tensor) -> TowerOutput:
        x = (self.embed(patches) + self.places(places))[None]
        for layer in self.layers:
            x = layer(x)
        token = torch.arange(x.shape[1], device=x.device)[None]
        starts, ends = cu_seqlens[:-1, None], cu_seqlens[1:, None]
        member = ((token >= starts) & (token < ends)).float()
        features = self.after(x)[0]
        mean = member @ features.float() / (ends - starts).clamp(min=1)
        return TowerOutput(self.project(mean.to(x.dtype)), features)


class PackedTower(Tower[np.ndarray]):
    """Items are float32 patches [n, PATCH]."""

    def __init__(self, module: PackedVit, head_dim: int, max_tokens: int) -> None:
        self.module = module
        self.spec = TowerSpec(
            family="packed-test",
            tower="vision",
            dimensions=OUT,
            head_dims=frozenset({head_dim}),
            mask_needs=frozenset({MaskNeed.SEGMENTS}),
            max_tokens=max_tokens,
            packed=True,
            token_dimensions=HEADS * head_dim,
        )

    def grid_of(self, item: np.ndarray) -> tuple[int, ...]:
        return (len(item), 1)

    def length_of(self, item: np.ndarray) -> int:
        return len(item)

    def collate(self, items: Sequence[np.ndarray], *, length: int | None = None) -> dict[str, torch.Tensor]:
        assert length is None
        return {
            "patches": torch.from_numpy(np.concatenate(list(items))),
            "places": torch.cat([torch.arange(len(item)) for item in items]),
            "cu_seqlens": torch.tensor(np.cumsum([0, *map(len, items)]), dtype=torch.int32),
        }

    def forward(self, inputs: Inputs) -> TowerOutput:
        out: TowerOutput = self.module(inputs["patches"], inputs["places"], inputs["cu_seqlens"])
        return out

    def golden_items(self) -> list[np.ndarray]:
        return pictures(GOLDEN_LENGTHS, seed=0)

    def describe_preprocessing(self) -> dict[str, Any]:
        return {"patches": PATCH}


def pictures(lengths: Sequence[int], seed: int) -> list[np.ndarray]:
    """Random pictures of so many patches each."""
    rng = np.random.default_rng(seed)
    return [rng.standard_normal((length, PATCH)).astype(np.float32) for length in lengths]


def sharp_vit(head_dim: int, max_tokens: int, seed: int = 0) -> PackedVit:
    """Seeded weights with queries and keys scaled up: with flat attention a fault in it would not show."""
    torch.manual_seed(seed)
    module = PackedVit(head_dim, max_tokens).eval().requires_grad_(False)
    for name, weight in module.named_parameters():
        if name.endswith(("query.weight", "key.weight")):
            weight.mul_(4.0)
    return module


def write_packed(folder: Path, *, head_dim: int = 80, max_tokens: int = 16, seed: int = 0) -> Path:
    """A checkpoint folder of the family."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(sharp_vit(head_dim, max_tokens, seed).state_dict(), folder / "model.safetensors")
    config = {"model_type": "packed-test", "head_dim": head_dim, "max_tokens": max_tokens}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def load_tower(checkpoint: Checkpoint, settings: EngineSettings) -> PackedTower:
    """What the registry calls."""
    head_dim, max_tokens = checkpoint.config["head_dim"], checkpoint.config["max_tokens"]
    module = PackedVit(head_dim, max_tokens).eval().requires_grad_(False)
    module.load_state_dict(load_file(checkpoint.folder / "model.safetensors"))
    return PackedTower(module, head_dim, max_tokens)


def alone(module: PackedVit, item: np.ndarray) -> np.ndarray:
    """The vector [OUT] of one item by itself in float64, with softmax(q·k)·v written out."""
    wide = PackedVit(module.layers[0].attention.query.out_features // HEADS, module.places.num_embeddings).double()
    wide.load_state_dict({name: weight.double() for name, weight in module.state_dict().items()})
    with torch.no_grad():
        x = wide.embed(torch.from_numpy(item).double()) + wide.places(torch.arange(len(item)))
        for layer in wide.layers:
            query, key, value = layer.attention.heads(layer.before(x)[None])
            weights = torch.softmax(query @ key.transpose(-1, -2) / math.sqrt(query.shape[-1]), dim=-1)
            x = x + layer.attention.out((weights @ value).transpose(1, 2).flatten(2))[0]
            x = x + layer.mlp(layer.between(x))
        vector: np.ndarray = wide.project(wide.after(x).mean(dim=0)).numpy()
    return vector
