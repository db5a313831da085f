"""What an attention backend is: one call in, one tensor out, and a declaration of what it takes.

Shapes: B batch, H heads, S tokens, D head_dim. Variable-size batches are packed: B is 1, S is all tokens of the batch,
and `Segments` says where one picture ends and the next begins.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from itertools import pairwise
from typing import ClassVar

import torch

from encoder.device import Device


class MaskNeed(StrEnum):
    """What a call asks of attention. `additive` is any dense mask, boolean or float, of no simpler kind."""

    NONE = "none"
    CAUSAL = "causal"
    KEY_PADDING = "key_padding"
    SEGMENTS = "segments"
    WINDOWS = "windows"
    ADDITIVE = "additive"


ALL_NEEDS = frozenset(MaskNeed)
# What boundaries are called, among a packed batch's inputs and where a layer names those that it attends by.
ITEM_BOUNDARIES = "cu_seqlens"
WINDOW_BOUNDARIES = "cu_window_seqlens"


@dataclass(frozen=True)
class HeadDims:
    """Head dims a kernel takes: multiples of `multiple_of` up to `maximum`, or, when given, exactly `exact`.

    With `pads`, smaller head dims are padded up to the next exact one; the scale stays that of the true head dim.
    """

    multiple_of: int = 1
    maximum: int = 4096
    exact: tuple[int, ...] = ()
    pads: bool = False

    def takes(self, head_dim: int) -> bool:
        if self.exact:
            return head_dim in self.exact or (self.pads and head_dim <= max(self.exact))
        return head_dim <= self.maximum and head_dim % self.multiple_of == 0

    def padded(self, head_dim: int) -> int:
        """The head dim the kernel will see for `head_dim`."""
        return min((d for d in self.exact if d >= head_dim), default=head_dim) if self.pads else head_dim

    def __str__(self) -> str:
        if self.exact:
            return ("padded to " if self.pads else "") + "/".join(str(d) for d in self.exact)
        return f"multiples of {self.multiple_of} up to {self.maximum}"


@dataclass(frozen=True)
class Capabilities:
    """What a backend declares; a call outside it goes to the fallback, counted."""

    mask_needs: frozenset[MaskNeed]
    dtypes: frozenset[str]
    head_dims: HeadDims = HeadDims()
    capturable: bool = True
    host_lengths: bool = False
    device_kinds: frozenset[str] = frozenset()
    min_architecture: str = ""
    max_architecture: str = ""


@dataclass(frozen=True)
class Segments:
    """Boundaries of a packed batch, computed once for it: cumulative lengths, first 0, last T.

    `cu_seqlens`: int32 [n + 1] on the device. `host`: the same on the host, or None inside a captured graph, where a
    backend must read the device's. `max_length`: an upper bound of the lengths. `replayed`: the call is captured and
    `host` holds the boundaries of this time alone; only a backend that is given new ones at each replay may read it.
    `name`: which of a batch's boundaries these are.
    """

    cu_seqlens: torch.Tensor
    host: tuple[int, ...] | None
    max_length: int
    replayed: bool = False
    name: str = ITEM_BOUNDARIES

    @classmethod
    def from_lengths(
        cls, lengths: Iterable[int], device: torch.device | str, name: str = ITEM_BOUNDARIES
    ) -> "Segments":
        host = [0]
        for length in lengths:
            host.append(host[-1] + length)
        longest = max((b - a for a, b in pairwise(host)), default=0)
        return cls(torch.tensor(host, dtype=torch.int32, device=device), tuple(host), longest, name=name)


@dataclass(frozen=True)
class AttentionCall:
    """One attention of one layer.

    `query`, `key`, `value`: [B, H, S, D], key and value maybe with fewer heads (grouped). `scale`: of q·k.
    `mask`: None, or broadcastable to [B, H, S, S]: boolean with True = attend, or float and added to q·k.
    `is_causal`: the lower triangle is asked for beside `mask`. `segments`: packed boundaries. `window`: (left, right)
    tokens a query sees, a negative side unbounded.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    mask: torch.Tensor | None = None
    is_causal: bool = False
    segments: Segments | None = None
    window: tuple[int, int] | None = None

    @cached_property
    def needs(self) -> frozenset[MaskNeed]:
        """What this call asks for, read from shapes and types alone (the device is not asked)."""
        found = set()
        if self.is_causal:
            found.add(MaskNeed.CAUSAL)
        if self.segments is not None:
            found.add(MaskNeed.SEGMENTS)
        if self.window is not None:
            found.add(MaskNeed.WINDOWS)
        if self.mask is not None:
            found.add(MaskNeed.KEY_PADDING if is_key_padding(self.mask) else MaskNeed.ADDITIVE)
        return frozenset(found) or frozenset({MaskNeed.NONE})


def is_key_padding(mask: torch.Tensor) -> bool:
    """Whether a mask is boolean and the same for every query: [B, 1, 1, S], or expanded from it."""
    if mask.dtype != torch.bool or mask.dim() < 2:
        return False
    same_for_queries = mask.shape[-2] == 1 or mask.stride(-2) == 0
    same_for_heads = mask.dim() < 3 or mask.shape[-3] == 1 or mask.stride(-3) == 0
    return same_for_queries and same_for_heads


class AttentionBackend(ABC):
    """An attention implementation. One instance serves every layer of one engine and keeps no state of a call."""

    name: ClassVar[str]
    capabilities: ClassVar[Capabilities]

    @classmethod
    @abstractmethod
    def unavailable(cls, device: Device) -> str | None:
        """Why this backend cannot run on `device`, or None when it can."""

    @abstractmethod
    def attend(self, call: AttentionCall) -> torch.Tensor:
        """The attended values, [B, H, S, D] in the query's dtype. Called only where `refusal` gave None."""

    def refusal(self, call: AttentionCall) -> str | None:
        """Why this call is outside what the backend declares, or None."""
        missing = call.needs - self.capabilities.mask_needs
        if missing:
            return f"mask need {'+'.join(sorted(missing))}"
        return self.misfit(dtype_name(call.query.dtype), call.query.shape[-1])

    @classmethod
    def misfit(cls, dtype: str, head_dim: int) -> str | None:
        """Why a numeric type or head dim is outside what the backend declares, or None."""
        if dtype not in cls.capabilities.dtypes:
            return f"dtype {dtype}"
        if not cls.capabilities.head_dims.takes(head_dim):
            return f"head_dim {head_dim}"
        return None


def dtype_name(dtype: torch.dtype) -> str:
    """'float32' of torch.float32, and so on."""
    return str(dtype).removeprefix("torch.")
