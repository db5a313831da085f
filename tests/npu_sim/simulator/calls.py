"""A log of the attention calls, by which a test proves what reached which operator."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

FUSED_OPERATOR = "npu_fused_infer_attention_score"


@dataclass(frozen=True)
class FusedCall:
    """One execution of the fused operator. ``phase`` is ``eager``, ``capture``, ``update`` or ``replay``.

    ``lengths`` and ``lengths_kv`` are what the caller passed: cumulative for TND, per batch entry else.
    ``mask_shape`` is None when the call had no mask.
    """

    phase: str
    name: str
    layout: str
    query_shape: tuple[int, ...]
    key_shape: tuple[int, ...]
    dtype: torch.dtype
    device: int
    num_heads: int
    num_key_value_heads: int
    scale: float
    sparse_mode: int
    lengths: tuple[int, ...] | None
    lengths_kv: tuple[int, ...] | None
    mask_shape: tuple[int, ...] | None
    mask_dtype: torch.dtype | None


@dataclass(frozen=True)
class SdpaCall:
    """One execution of torch's scaled_dot_product_attention on an npu tensor.

    ``float_mask`` marks the calls that leave the real device's fused path for the slow one: an additive mask.
    """

    phase: str
    query_shape: tuple[int, ...]
    dtype: torch.dtype
    device: int
    is_causal: bool
    mask_shape: tuple[int, ...] | None
    mask_dtype: torch.dtype | None

    @property
    def float_mask(self) -> bool:
        return self.mask_dtype is not None and self.mask_dtype.is_floating_point

    @classmethod
    def of(cls, phase: str, named: dict[str, Any]) -> SdpaCall:
        """From the operator's arguments by name."""
        query, mask = named["query"], named.get("attn_mask")
        return cls(
            phase=phase,
            query_shape=tuple(query.shape),
            dtype=query.dtype,
            device=query.device.index,
            is_causal=bool(named.get("is_causal", False)),
            mask_shape=None if mask is None else tuple(mask.shape),
            mask_dtype=None if mask is None else mask.dtype,
        )


class CallLog:
    """The calls since the last ``clear``, in the order in which they ran."""

    def __init__(self) -> None:
        self._calls: list[FusedCall | SdpaCall] = []

    def add(self, call: FusedCall | SdpaCall) -> None:
        self._calls.append(call)

    def clear(self) -> None:
        self._calls.clear()

    @property
    def all(self) -> Sequence[FusedCall | SdpaCall]:
        return tuple(self._calls)

    @property
    def fused(self) -> list[FusedCall]:
        return [call for call in self._calls if isinstance(call, FusedCall)]

    @property
    def sdpa(self) -> list[SdpaCall]:
        return [call for call in self._calls if isinstance(call, SdpaCall)]
