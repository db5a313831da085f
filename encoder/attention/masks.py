"""Dense boolean masks (True = attend) for backends that need one, all computed on the tensors' own device."""

import torch

from encoder.attention.backend import AttentionCall, Segments


def causal_mask(queries: int, keys: int, device: torch.device) -> torch.Tensor:
    """[queries, keys], the lower triangle (query i sees keys 0..i)."""
    return torch.arange(keys, device=device)[None, :] <= torch.arange(queries, device=device)[:, None]


def window_mask(queries: int, keys: int, window: tuple[int, int], device: torch.device) -> torch.Tensor:
    """[queries, keys]: query i sees keys i-left..i+right; a negative side is unbounded."""
    left, right = window
    offset = torch.arange(keys, device=device)[None, :] - torch.arange(queries, device=device)[:, None]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if left >= 0:
        seen &= offset >= -left
    if right >= 0:
        seen &= offset <= right
    return seen


def segment_mask(segments: Segments, tokens: int) -> torch.Tensor:
    """[tokens, tokens]: a token sees its own segment; tokens past the last boundary see nothing and are unseen."""
    boundaries = segments.cu_seqlens.long()
    position = torch.arange(tokens, device=boundaries.device)
    segment = torch.searchsorted(boundaries, position, right=True)
    covered = position < boundaries[-1]
    return (segment[:, None] == segment[None, :]) & covered[:, None] & covered[None, :]


def dense_mask(call: AttentionCall) -> torch.Tensor | None:
    """All that a call asks for, in one mask that broadcasts to [B, H, S, S]: boolean, or float when the call's is."""
    queries, keys, device = call.query.shape[-2], call.key.shape[-2], call.query.device
    seen: torch.Tensor | None = None
    if call.is_causal:
        seen = causal_mask(queries, keys, device)
    if call.window is not None:
        seen = _both(seen, window_mask(queries, keys, call.window, device))
    if call.segments is not None:
        seen = _both(seen, segment_mask(call.segments, queries))
    if call.mask is None:
        return seen
    if call.mask.dtype == torch.bool:
        return _both(seen, call.mask)
    return call.mask if seen is None else call.mask.masked_fill(~seen, float("-inf"))


def allowed(mask: torch.Tensor) -> torch.Tensor:
    """Where a boolean or float mask lets a query see a key at all."""
    return mask if mask.dtype == torch.bool else mask != float("-inf")


def clear_unseen_keys(mask: torch.Tensor, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Keys or values [B, H, S, D] with those that no query may see set to zero.

    A weight of zero does not silence a NaN: 0 * NaN is NaN, so what stands in padding must not reach the product.
    """
    unseen = ~allowed(mask).any(dim=-2).unsqueeze(-1)
    if unseen.dim() == 2:
        unseen = unseen[None, None]
    if unseen.dim() == 4 and unseen.shape[1] > 1 and unseen.shape[1] != tensors[0].shape[1]:
        unseen = unseen.all(dim=1, keepdim=True)  # grouped heads: a key is unseen only when no head sees it
    return tuple(tensor.masked_fill(unseen, 0) for tensor in tensors)


def _both(first: torch.Tensor | None, second: torch.Tensor) -> torch.Tensor:
    return second if first is None else first & second
