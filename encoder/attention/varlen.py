"""torch's own variable-length attention (FlashAttention inside), torch.nn.attention.varlen, torch 2.10 and later."""

from typing import ClassVar

import torch

from encoder.attention.backend import AttentionBackend, AttentionCall, Capabilities, HeadDims, MaskNeed
from encoder.attention.packed import kernel_window, pack, unequal_lengths, unpack
from encoder.device import Device, compute_capability


class VarlenAttention(AttentionBackend):
    """Packed segments, causal and windows; dense masks it does not take. CUDA from sm_80."""

    name = "varlen"
    capabilities: ClassVar[Capabilities] = Capabilities(
        mask_needs=frozenset({MaskNeed.NONE, MaskNeed.CAUSAL, MaskNeed.SEGMENTS, MaskNeed.WINDOWS}),
        dtypes=frozenset({"bfloat16", "float16"}),
        head_dims=HeadDims(multiple_of=8, maximum=256),
        device_kinds=frozenset({"cuda"}),
        min_architecture="sm_80",
    )

    @classmethod
    def unavailable(cls, device: Device) -> str | None:
        if device.kind != "cuda":
            return f"it needs a CUDA device, this is {device.kind}"
        if compute_capability(device) < (8, 0):
            return f"it needs sm_80 or newer, this is {device.architecture}"
        try:
            from torch.nn.attention.varlen import varlen_attn  # noqa: F401
        except ImportError:
            return f"torch {torch.__version__} has no torch.nn.attention.varlen"
        return None

    def refusal(self, call: AttentionCall) -> str | None:
        return unequal_lengths(call) or super().refusal(call)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        from torch.nn.attention.varlen import varlen_attn

        packed = pack(call)
        attended = varlen_attn(
            packed.query,
            packed.key,
            packed.value,
            packed.cu_seqlens,
            packed.cu_seqlens,
            packed.max_length,
            packed.max_length,
            scale=call.scale,
            window_size=kernel_window(call),
            enable_gqa=packed.query.shape[1] != packed.key.shape[1],
        )
        assert isinstance(attended, torch.Tensor)
        return unpack(attended, call)
