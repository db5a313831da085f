"""Stand-ins for variable-length kernels that need a GPU: their real signatures, their rules, and right values.

The signatures are those of torch 2.13 (`torch.nn.attention.varlen`), flash-attn 2.8, flash-attn 3 (hopper) and
flash-attn-4 4.0 beta. A call that the real function would refuse is refused here.
"""

import sys
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from itertools import pairwise
from types import ModuleType
from typing import Any

import pytest
import torch


def packed_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    boundaries: torch.Tensor,
    max_length: int,
    scale: float,
    left: int | None,
    right: int | None,
) -> torch.Tensor:
    """softmax(q·k)·v segment by segment in float64; query i sees keys i-left..i+right, None is open."""
    total, heads, _ = query.shape
    for tensor in (query, key, value):
        assert tensor.is_contiguous() and tensor.dtype in (torch.float16, torch.bfloat16), tensor.dtype
    assert key.shape == value.shape and heads % key.shape[1] == 0
    assert boundaries.dtype == torch.int32 and boundaries.is_contiguous() and boundaries.device == query.device
    ends = boundaries.tolist()
    assert ends[0] == 0 and ends[-1] == total, "rows that no segment covers are corrupted by some kernels"
    assert isinstance(max_length, int)
    out = torch.zeros_like(query)
    for start, end in pairwise(ends):
        assert 0 <= end - start <= max_length, "a segment longer than the kernel was told"
        rows = slice(start, end)
        q, k, v = (t[rows].double().transpose(0, 1) for t in (query, key, value))
        k, v = (t.repeat_interleave(heads // key.shape[1], dim=0) for t in (k, v))
        offset = torch.arange(end - start)[None] - torch.arange(end - start)[:, None]
        seen = torch.ones_like(offset, dtype=torch.bool)
        if left is not None:
            seen &= offset >= -left
        if right is not None:
            seen &= offset <= right
        weights = torch.softmax((q @ k.transpose(1, 2) * scale).masked_fill(~seen, float("-inf")), dim=-1).nan_to_num()
        out[rows] = (weights @ v).transpose(0, 1).to(out.dtype)
    return out


def bound(side: int) -> int | None:
    """A side of a window where -1 is open."""
    assert isinstance(side, int)
    return None if side == -1 else side


def torch_varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor | None,
    max_q: int,
    max_k: int,
    *,
    return_aux: Any = None,
    scale: float | None = None,
    window_size: tuple[int, int] = (-1, -1),
    enable_gqa: bool = False,
    seqused_k: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    num_splits: int | None = None,
) -> torch.Tensor:
    assert return_aux is None and seqused_k is None and block_table is None and num_splits is None
    assert cu_seq_k is cu_seq_q and max_q == max_k and scale is not None
    if not enable_gqa and query.size(1) != key.size(1):
        raise ValueError("Expect query and key/value to have the same number of heads")
    return packed_attention(query, key, value, cu_seq_q, max_q, scale, *map(bound, window_size))


def flash_2(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = (-1, -1),
    softcap: float = 0.0,
    alibi_slopes: Any = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Any = None,
) -> torch.Tensor:
    assert cu_seqlens_k is cu_seqlens_q and max_seqlen_q == max_seqlen_k
    left, right = map(bound, window_size)
    assert softmax_scale is not None
    return packed_attention(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, left, 0 if causal else right)


def flash_3(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    cu_seqlens_k: torch.Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    seqused_q: Any = None,
    seqused_k: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    qv: Any = None,
    q_descale: Any = None,
    k_descale: Any = None,
    v_descale: Any = None,
    window_size: tuple[int, int] = (-1, -1),
    attention_chunk: int = 0,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Any = None,
    deterministic: bool = False,
    sm_margin: int = 0,
    return_attn_probs: bool = False,
) -> torch.Tensor:
    assert cu_seqlens_k is cu_seqlens_q and max_seqlen_q == max_seqlen_k
    left, right = map(bound, window_size)
    assert softmax_scale is not None
    return packed_attention(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, left, 0 if causal else right)


def flash_3_first_releases(*args: Any, **named: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """They answered (out, lse)."""
    return flash_3(*args, **named), torch.zeros(1)


def flash_4(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    qv: Any = None,
    cu_seqlens_q: torch.Tensor | None = None,
    cu_seqlens_k: torch.Tensor | None = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    min_seqlen_k: int | None = None,
    seqused_q: Any = None,
    seqused_k: Any = None,
    gather_kv_indices: Any = None,
    page_table: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = (None, None),
    learnable_sink: Any = None,
    softcap: float = 0.0,
    num_splits: int = 1,
    pack_gqa: Any = None,
    deterministic: bool = False,
    return_lse: bool = False,
) -> tuple[torch.Tensor, None]:
    """None is open, and a negative number is a bound like any other, unless both are negative."""
    assert cu_seqlens_q is not None and cu_seqlens_k is cu_seqlens_q and qv is None
    assert max_seqlen_q is not None and max_seqlen_q == max_seqlen_k and softmax_scale is not None
    left, right = window_size
    if left is not None and right is not None and left < 0 and right < 0:
        left, right = None, None
    if causal:
        right = 0
    return packed_attention(q, k, v, cu_seqlens_q, max_seqlen_q, softmax_scale, left, right), None


FLASH: dict[str, tuple[tuple[str, ...], Callable[..., Any]]] = {
    "2": (("flash_attn",), flash_2),
    "3": (("flash_attn_interface",), flash_3),
    "3, first releases": (("flash_attn_interface",), flash_3_first_releases),
    "4": (("flash_attn.cute", "cutlass"), flash_4),
}
ALL_MODULES = ("flash_attn", "flash_attn.cute", "flash_attn_interface", "cutlass")


def install(monkeypatch: pytest.MonkeyPatch, *versions: str, without: tuple[str, ...] = ()) -> None:
    """Makes these versions, and no others, importable; `without` are modules that are missing all the same."""
    for module in ALL_MODULES:
        monkeypatch.setitem(sys.modules, module, None)
    for version in versions:
        modules, function = FLASH[version]
        for name in modules:
            if name in without:
                continue
            made = ModuleType(name)
            made.__spec__ = ModuleSpec(name, None)
            made.flash_attn_varlen_func = function  # type: ignore[attr-defined]
            monkeypatch.setitem(sys.modules, name, made)
