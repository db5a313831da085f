"""The fp32 reference: attention written out in float32, the oracle of the self-check. Slow, and right everywhere."""

from typing import ClassVar

import torch

from encoder.attention.backend import ALL_NEEDS, AttentionBackend, AttentionCall, Capabilities
from encoder.attention.masks import allowed, clear_unseen_keys, dense_mask
from encoder.device import Device

# Scores that are held at a time: of thousands of tokens all would fill the memory. 512 MiB in float32.
SCORES_AT_ONCE = 1 << 27


class ReferenceAttention(AttentionBackend):
    """softmax(q·kᵀ·scale + mask)·v in float32; a query that may see nothing gives zeros."""

    name = "reference"
    capabilities: ClassVar[Capabilities] = Capabilities(
        mask_needs=ALL_NEEDS, dtypes=frozenset({"float32", "bfloat16", "float16", "float64"})
    )

    @classmethod
    def unavailable(cls, device: Device) -> str | None:
        return None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        query, key, value = (t.float() for t in (call.query, call.key, call.value))
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        mask = dense_mask(call)
        if mask is not None:
            key, value = clear_unseen_keys(mask, key, value)
        at_once = max(1, SCORES_AT_ONCE // (query.shape[0] * query.shape[1] * key.shape[2]))
        parts = []
        for start in range(0, query.shape[2], at_once):
            rows = slice(start, start + at_once)
            seen = mask if mask is None or mask.shape[-2] == 1 else mask[..., rows, :]
            parts.append(_attended(query[:, :, rows], key, value, call.scale, seen))
        return torch.cat(parts, dim=2).to(call.query.dtype)


def _attended(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, mask: torch.Tensor | None
) -> torch.Tensor:
    """float32 [B, H, queries, D] of queries, all keys and all values."""
    scores = query @ key.transpose(-1, -2) * scale
    if mask is None:
        return torch.softmax(scores, dim=-1) @ value
    if mask.dtype != torch.bool:
        scores = scores + mask.float()
    weights = torch.softmax(scores.masked_fill(~allowed(mask), float("-inf")), dim=-1)
    return weights.masked_fill(~allowed(mask).any(dim=-1, keepdim=True), 0) @ value
