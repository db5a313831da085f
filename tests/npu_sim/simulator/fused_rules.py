"""What ``npu_fused_infer_attention_score`` accepts, as documented, and how its layouts map to heads and lengths.

Sources: the operator's text in the torch_npu 2.13 wheel (``torch_npu/_op_plugin_docs.py``) and the tiling checks of
CANN's public operator sources (``ops-transformer``, ``fused_infer_attention_score/op_host``). Where the two differ the
stricter one holds, except for TND: newer kernels take head_dim 64, 128 and 192, the wheel's text still says 192.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch

SUPPORTED_DEVICES = ("Ascend910B", "Ascend910_93")  # A2 and A3
RANKS = {"BSH": 3, "BSND": 4, "BNSD": 4, "BNSD_BSND": 4, "TND": 3}
TND_HEAD_DIMS = (64, 128, 192)
OLD_TND_HEAD_DIMS = (192,)
MASK_DTYPES = (torch.bool, torch.int8, torch.uint8)
COMPRESSED_MASK = 2048
MAX_HEADS, MAX_HEAD_DIM, MAX_HIDDEN, MAX_TND_SEQUENCES = 256, 512, 65535, 4096


@dataclass(frozen=True)
class AttentionCall:
    """A checked call. Lengths are valid lengths per sequence; for TND they also cut the T axis."""

    layout: str
    num_heads: int
    num_key_value_heads: int
    head_dim: int
    lengths: tuple[int, ...]
    lengths_kv: tuple[int, ...]
    scale: float
    sparse_mode: int
    pre_tokens: int
    next_tokens: int
    zero_masked_rows: bool


def refuse(reason: str) -> NoReturn:
    """Raises as torch_npu does when the operator turns a call down (561002 is what public reports show)."""
    raise RuntimeError(f"call aclnnFusedInferAttentionScoreV3 failed, error code is 561002: {reason}")


def _require(holds: bool, reason: str) -> None:
    if not holds:
        refuse(reason)


def check_call(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    device_name: str,
    old_cann: bool,
    atten_mask: torch.Tensor | None,
    actual_seq_lengths: Sequence[int] | None,
    actual_seq_lengths_kv: Sequence[int] | None,
    num_heads: int,
    num_key_value_heads: int,
    scale: float,
    pre_tokens: int,
    next_tokens: int,
    input_layout: str,
    sparse_mode: int,
    inner_precise: int,
) -> AttentionCall:
    """Checks a call against the documented limits; raises RuntimeError with the reason when it breaks one."""
    _require(device_name.startswith(SUPPORTED_DEVICES), f"{device_name} is not supported, only A2 and A3 devices are")
    _check_tensors(query, key, value, input_layout)
    heads, kv_heads = num_heads, num_key_value_heads or num_heads
    head_dim = _check_heads(query, key, input_layout, heads, kv_heads)
    allowed = OLD_TND_HEAD_DIMS if old_cann else TND_HEAD_DIMS
    if input_layout == "TND":
        _require(head_dim in allowed, f"with TND, head_dim must be one of {allowed}, got {head_dim}")
        lengths = _tnd_lengths("actual_seq_lengths", actual_seq_lengths, query.shape[0])
        lengths_kv = _tnd_lengths("actual_seq_lengths_kv", actual_seq_lengths_kv, key.shape[0])
        _require(len(lengths) == len(lengths_kv), f"{len(lengths)} query and {len(lengths_kv)} key sequences")
    else:
        _require(query.shape[0] == key.shape[0], f"batch of query {query.shape[0]} and of key {key.shape[0]} differ")
        axis = 2 if input_layout.startswith("BNSD") else 1
        lengths = _batch_lengths("actual_seq_lengths", actual_seq_lengths, query.shape[0], query.shape[axis])
        lengths_kv = _batch_lengths("actual_seq_lengths_kv", actual_seq_lengths_kv, key.shape[0], key.shape[axis])
    _check_mask(atten_mask, sparse_mode, input_layout, query, key)
    if input_layout == "TND" and sparse_mode == 3:
        too_long = [i for i, (q, kv) in enumerate(zip(lengths, lengths_kv, strict=True)) if q > kv]
        _require(not too_long, f"with TND and sparse_mode 3, sequence {too_long} has more queries than keys")
    return AttentionCall(
        layout=input_layout,
        num_heads=heads,
        num_key_value_heads=kv_heads,
        head_dim=head_dim,
        lengths=lengths,
        lengths_kv=lengths_kv,
        scale=scale,
        sparse_mode=sparse_mode,
        pre_tokens=pre_tokens,
        next_tokens=next_tokens,
        zero_masked_rows=bool(inner_precise & 2),
    )


def _check_tensors(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, layout: str) -> None:
    _require(layout in RANKS, f"input_layout {layout} is not supported, choose from {', '.join(RANKS)}")
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        _require(tensor.dtype in (torch.float16, torch.bfloat16), f"{name} must be float16 or bfloat16: {tensor.dtype}")
        _require(tensor.dtype == query.dtype, f"{name} is {tensor.dtype} but query is {query.dtype}")
        _require(tensor.is_contiguous(), f"{name} must be contiguous, its strides are {tensor.stride()}")
        _require(tensor.dim() == RANKS[layout], f"{layout} wants {RANKS[layout]} dimensions, {name} has {tensor.dim()}")
    _require(key.shape == value.shape, f"key {tuple(key.shape)} and value {tuple(value.shape)} must have one shape")


def _check_heads(query: torch.Tensor, key: torch.Tensor, layout: str, heads: int, kv_heads: int) -> int:
    """The head dimension, after the head counts were checked against the shapes."""
    _require(1 <= heads <= MAX_HEADS, f"num_heads must be in 1..{MAX_HEADS}, got {heads}")
    _require(heads % kv_heads == 0, f"num_heads {heads} is no multiple of num_key_value_heads {kv_heads}")
    if layout == "BSH":
        _require(query.shape[-1] % heads == 0, f"H {query.shape[-1]} is no multiple of num_heads {heads}")
        _require(key.shape[-1] % kv_heads == 0, f"key's H {key.shape[-1]} is no multiple of {kv_heads} heads")
        head_dim, key_dim = query.shape[-1] // heads, key.shape[-1] // kv_heads
    else:
        axis = {"BSND": 2, "TND": 1}.get(layout, 1)
        _require(query.shape[axis] == heads, f"query has {query.shape[axis]} heads, num_heads is {heads}")
        _require(key.shape[axis] == kv_heads, f"key has {key.shape[axis]} heads, num_key_value_heads is {kv_heads}")
        head_dim, key_dim = query.shape[-1], key.shape[-1]
    _require(head_dim == key_dim, f"head_dim of query {head_dim} and of key {key_dim} differ")
    _require(head_dim % 16 == 0, f"head_dim must be a multiple of 16, got {head_dim}")
    _require(head_dim <= MAX_HEAD_DIM, f"head_dim must be at most {MAX_HEAD_DIM}, got {head_dim}")
    if layout in ("BSH", "BSND"):
        _require(heads * head_dim < MAX_HIDDEN, f"with {layout}, N*D must be below {MAX_HIDDEN}: {heads * head_dim}")
    return head_dim


def _tnd_lengths(name: str, given: Sequence[int] | None, total: int) -> tuple[int, ...]:
    """Sequence lengths from cumulative ends, which must rise to T."""
    _require(given is not None and len(given) > 0, f"TND needs {name}")
    assert given is not None
    ends = [int(x) for x in given]
    _require(len(ends) <= MAX_TND_SEQUENCES, f"{name} has {len(ends)} entries, the most is {MAX_TND_SEQUENCES}")
    starts = [0, *ends[:-1]]
    rising = all(start <= end for start, end in zip(starts, ends, strict=True))
    _require(rising, f"{name} must be cumulative and never fall, got {ends}")
    _require(ends[-1] == total, f"T({total}) must equal the last element of {name}({ends[-1]})")
    return tuple(end - start for start, end in zip(starts, ends, strict=True))


def _batch_lengths(name: str, given: Sequence[int] | None, batch: int, most: int) -> tuple[int, ...]:
    """Valid lengths per batch entry; one length stands for all, more than the batch are ignored."""
    if given is None:
        return (most,) * batch
    entries = [int(x) for x in given]
    _require(len(entries) == 1 or len(entries) >= batch, f"{name} has {len(entries)} entries, 1 or {batch} are wanted")
    entries = entries * batch if len(entries) == 1 else entries[:batch]
    _require(all(0 <= x <= most for x in entries), f"{name} must be in 0..{most}, got {entries}")
    return tuple(entries)


def _check_mask(
    mask: torch.Tensor | None, sparse_mode: int, layout: str, query: torch.Tensor, key: torch.Tensor
) -> None:
    _require(sparse_mode in (0, 1, 2, 3, 4), f"sparse_mode must be in 0..4, got {sparse_mode}")
    if mask is None:
        _require(sparse_mode == 0, f"sparse_mode {sparse_mode} needs an atten_mask")
        return
    _require(mask.dtype in MASK_DTYPES, f"atten_mask must be bool, int8 or uint8 (True = masked), got {mask.dtype}")
    _require(mask.is_contiguous(), f"atten_mask must be contiguous, its strides are {mask.stride()}")
    if sparse_mode >= 2:
        side = (COMPRESSED_MASK, COMPRESSED_MASK)
        wanted = [side, (1, *side), (1, 1, *side)]
    else:
        _require(layout != "TND", "TND takes a mask with sparse_mode 3 or 4 alone")
        axis = 2 if layout.startswith("BNSD") else 1
        batch, rows, columns = query.shape[0], query.shape[axis], key.shape[axis]
        wanted = [(1, rows, columns), (batch, 1, rows, columns), (1, 1, rows, columns)]
        wanted.append((batch, columns) if rows == 1 else (rows, columns))
    _require(layout != "TND" or sparse_mode in (0, 3, 4), f"TND does not take sparse_mode {sparse_mode}")
    got = tuple(mask.shape)
    _require(got in wanted, f"atten_mask has shape {got}, with sparse_mode {sparse_mode} it must be one of {wanted}")
