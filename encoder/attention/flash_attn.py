"""The flash-attn packages, where installed: 4 (`flash_attn.cute`), 3 (`flash_attn_interface`) or 2 (`flash_attn`).

They stay optional: 2 has no prebuilt wheel for a plain pip install, 3 is for sm_90, 4 for sm_90 and sm_100.
"""

from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec
from typing import Any, ClassVar

import torch

from encoder.attention.backend import AttentionBackend, AttentionCall, Capabilities, HeadDims, MaskNeed
from encoder.attention.packed import kernel_window, pack, unpack
from encoder.device import Device, compute_capability

# version: (module, least and greatest major compute capability)
VERSIONS: dict[int, tuple[str, int, int]] = {
    4: ("flash_attn.cute", 9, 10),
    3: ("flash_attn_interface", 9, 9),
    2: ("flash_attn", 8, 12),
}


def installed_version(device: Device) -> int | None:
    """The newest flash-attn that is installed and made for this device's compute capability."""
    major, _ = compute_capability(device)
    for version, (module, least, greatest) in VERSIONS.items():
        if least <= major <= greatest and _is_there(module):
            return version
    return None


def _is_there(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except ModuleNotFoundError:  # the parent package is missing
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
        self._function: Callable[..., Any] | None = None

    @classmethod
    def unavailable(cls, device: Device) -> str | None:
        if device.kind != "cuda":
            return f"it needs a CUDA device, this is {device.kind}"
        if compute_capability(device) < (8, 0):
            return f"it needs sm_80 or newer, this is {device.architecture}"
        if installed_version(device) is None:
            return f"no flash-attn for {device.architecture} is installed"
        return None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        if self._function is None:
            self._function = self._load(call.query.device)
        packed = pack(call)
        attended = self._function(
            packed.query,
            packed.key,
            packed.value,
            cu_seqlens_q=packed.cu_seqlens,
            cu_seqlens_k=packed.cu_seqlens,
            max_seqlen_q=packed.max_length,
            max_seqlen_k=packed.max_length,
            softmax_scale=call.scale,
            causal=call.is_causal,
            window_size=kernel_window(call),
        )
        # Versions 3 and 4 may answer (out, lse).
        return unpack(attended[0] if isinstance(attended, tuple) else attended, call)

    @staticmethod
    def _load(device: torch.device) -> Callable[..., Any]:
        major, _ = torch.cuda.get_device_capability(device)
        for module, least, greatest in VERSIONS.values():
            if least <= major <= greatest and _is_there(module):
                function: Callable[..., Any] = import_module(module).flash_attn_varlen_func
                return function
        raise ImportError("no flash-attn for this device is installed")
