"""The flash-attn packages, where installed: 4 (`flash_attn.cute`), 3 (`flash_attn_interface`) or 2 (`flash_attn`).

They stay optional: 2 has no prebuilt wheel for a plain pip install, 3 is for sm_90, 4 for sm_90 and sm_100.
"""

from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from encoder.attention.backend import AttentionBackend, AttentionCall, Capabilities, HeadDims, MaskNeed
from encoder.attention.packed import kernel_window, pack, unequal_lengths, unpack
from encoder.device import Device, compute_capability


@dataclass(frozen=True)
class Version:
    """One of the packages: the modules it needs, the first with `flash_attn_varlen_func`, and its compute capabilities.

    `not_on`: capabilities within the majors that are left out. `unbounded`: how its windows say that a side is open.
    """

    number: int
    modules: tuple[str, ...]
    majors: frozenset[int]
    not_on: frozenset[tuple[int, int]] = frozenset()
    unbounded: int | None = -1


# Best first: 3 was made for sm_90, where 4 is young; 4 for sm_100.
VERSIONS = (
    Version(3, ("flash_attn_interface",), frozenset({9})),
    # -1 would be taken as a bound here: a causal call would see no key but those from its own on.
    Version(4, ("flash_attn.cute", "cutlass"), frozenset({9, 10}), frozenset({(10, 3)}), unbounded=None),
    Version(2, ("flash_attn",), frozenset({8, 9, 10, 11, 12})),
)


def installed_version(capability: tuple[int, int]) -> Version | None:
    """The best flash-attn that is installed and made for a device's compute capability."""
    for version in VERSIONS:
        made_for_it = capability[0] in version.majors and capability not in version.not_on
        if made_for_it and all(_is_there(module) for module in version.modules):
            return version
    return None


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, OSError, ValueError):  # the parent package is missing or broken, or half imported
        return False


class FlashAttention(AttentionBackend):
    """flash_attn_varlen_func of whichever version fits; packed segments, causal and windows. CUDA from sm_80."""

    name = "flash_attn"
    capabilities: ClassVar[Capabilities] = Capabilities(
        mask_needs=frozenset({MaskNeed.NONE, MaskNeed.CAUSAL, MaskNeed.SEGMENTS, MaskNeed.WINDOWS}),
        dtypes=frozenset({"bfloat16", "float16"}),
        head_dims=HeadDims(multiple_of=8, maximum=256),
        device_kinds=frozenset({"cuda"}),
        min_architecture="sm_80",
    )

    def __init__(self) -> None:
        self._loaded: tuple[Version, Callable[..., Any]] | None = None

    @classmethod
    def unavailable(cls, device: Device) -> str | None:
        if device.kind != "cuda":
            return f"it needs a CUDA device, this is {device.kind}"
        capability = compute_capability(device)
        if capability < (8, 0):
            return f"it needs sm_80 or newer, this is {device.architecture}"
        if installed_version(capability) is None:
            return f"no flash-attn for {device.architecture} is installed"
        return None

    def refusal(self, call: AttentionCall) -> str | None:
        return unequal_lengths(call) or super().refusal(call)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if self._loaded is None:
            self._loaded = self._load(call.query.device)
        version, function = self._loaded
        packed = pack(call)
        left, right = (side if side >= 0 else version.unbounded for side in kernel_window(call))
        attended = function(
            packed.query,
            packed.key,
            packed.value,
            cu_seqlens_q=packed.cu_seqlens,
            cu_seqlens_k=packed.cu_seqlens,
            max_seqlen_q=packed.max_length,
            max_seqlen_k=packed.max_length,
            softmax_scale=call.scale,
            causal=call.is_causal,
            window_size=(left, right),
        )
        # Version 4 answers (out, lse), version 3 did so in its first releases.
        return unpack(attended[0] if isinstance(attended, tuple) else attended, call)

    @staticmethod
    def _load(device: torch.device) -> tuple[Version, Callable[..., Any]]:
        version = installed_version(torch.cuda.get_device_capability(device))
        if version is None:
            raise ImportError("no flash-attn for this device is installed")
        return version, import_module(version.modules[0]).flash_attn_varlen_func
