"""The fp32 reference: attention written out in float32, the oracle of the self-check. Slow, and right everywhere."""

from typing import ClassVar

import torch

from encoder.attention.backend import ALL_NEEDS, AttentionBackend, AttentionCall, Capabilities
from encoder.attention.masks import allowed, clear_unseen_keys, dense_mask
from encoder.device import Device


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
        if mask is None:
            weights = torch.softmax(query @ key.transpose(-1, -2) * call.scale, dim=-1)
            return (weights @ value).to(call.query.dtype)
        key, value = clear_unseen_keys(mask, key, value)
        scores = query @ key.transpose(-1, -2) * call.scale
        if mask.dtype != torch.bool:
            scores = scores + mask.float()
        weights = torch.softmax(scores.masked_fill(~allowed(mask), float("-inf")), dim=-1)
        weights = weights.masked_fill(~allowed(mask).any(dim=-1, keepdim=True), 0)
        return (weights @ value).to(call.query.dtype)
