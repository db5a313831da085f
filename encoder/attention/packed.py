"""From [B, H, S, D] to the packed layout [T, H, D] of variable-length kernels, and back."""

from dataclasses import dataclass

import torch

from encoder.attention.backend import AttentionCall


@dataclass(frozen=True)
class Packed:
    """A call in packed layout: tensors [T, heads, D], device boundaries int32 [n + 1], longest segment."""

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    cu_seqlens: torch.Tensor
    max_length: int


def pack(call: AttentionCall) -> Packed:
    """A batch without segments becomes one segment a row; made anew each call, since a graph must own what it reads."""
    batch, _, tokens, _ = call.query.shape
    query, key, value = (t.transpose(1, 2).flatten(0, 1).contiguous() for t in (call.query, call.key, call.value))
    if call.segments is not None:
        return Packed(query, key, value, call.segments.cu_seqlens, call.segments.max_length)
    boundaries = torch.arange(0, (batch + 1) * tokens, tokens, dtype=torch.int32, device=query.device)
    return Packed(query, key, value, boundaries, tokens)


def unpack(attended: torch.Tensor, call: AttentionCall) -> torch.Tensor:
    """[T, H, D] back to [B, H, S, D]."""
    batch, heads, tokens, head_dim = call.query.shape
    return attended.view(batch, tokens, heads, head_dim).transpose(1, 2)


def kernel_window(call: AttentionCall) -> tuple[int, int]:
    """(left, right) as FlashAttention takes it: -1 is unbounded, a causal call sees nothing to the right."""
    left, right = call.window or (-1, -1)
    return left, 0 if call.is_causal else right


def unequal_lengths(call: AttentionCall) -> str | None:
    """Why a call is no self-attention, or None: one set of boundaries stands for queries and keys here."""
    queries, keys = call.query.shape[-2], call.key.shape[-2]
    return None if queries == keys else "queries and keys of different lengths"
