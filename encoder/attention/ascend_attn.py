"""Ascend's fused attention, `npu_fused_infer_attention_score` (torch_npu 2.13).

It takes no mask here: a masked call goes to SDPA. Lengths go by keyword, since a captured graph can update only those.
Head dims are padded to 64 or 128, and the scale stays that of the true head dim. Not for 310P, which lacks it.
"""

from typing import ClassVar

import torch
import torch.nn.functional as F

from encoder.attention.backend import AttentionBackend, AttentionCall, Capabilities, HeadDims, MaskNeed
from encoder.device import Device


class AscendAttention(AttentionBackend):
    """Unmasked batches (BNSD) and packed segments (TND), fp16 and bf16, on A2 and A3 chips."""

    name = "ascend_attn"
    capabilities: ClassVar[Capabilities] = Capabilities(
        mask_needs=frozenset({MaskNeed.NONE, MaskNeed.SEGMENTS}),
        dtypes=frozenset({"bfloat16", "float16"}),
        head_dims=HeadDims(exact=(64, 128), pads=True),
        host_lengths=True,
        device_kinds=frozenset({"npu"}),
        min_architecture="Ascend910B",
    )

    @classmethod
    def unavailable(cls, device: Device) -> str | None:
        if device.kind != "npu":
            return f"it needs an Ascend NPU, this is {device.kind}"
        if "310" in device.architecture:
            return f"{device.architecture} has no fused inference attention"
        return None

    def refusal(self, call: AttentionCall) -> str | None:
        if call.segments is not None and call.segments.host is None:
            return "no host lengths"
        return super().refusal(call)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        head_dim = call.query.shape[-1]
        missing = self.capabilities.head_dims.padded(head_dim) - head_dim
        query, key, value = (F.pad(t, (0, missing)) if missing else t for t in (call.query, call.key, call.value))
        if call.segments is None:
            attended = self._fused(query, key, value, call.scale, layout="BNSD")
        else:
            assert call.segments.host is not None
            query, key, value = (t[0].transpose(0, 1) for t in (query, key, value))
            ends = list(call.segments.host[1:])
            attended = self._fused(query, key, value, call.scale, layout="TND", ends=ends).transpose(0, 1)[None]
        return attended[..., :head_dim]

    @staticmethod
    def _fused(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        *,
        layout: str,
        ends: list[int] | None = None,
    ) -> torch.Tensor:
        import torch_npu  # dimension 1 is the heads in both layouts

        attended: torch.Tensor = torch_npu.npu_fused_infer_attention_score(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            actual_seq_lengths=ends,
            actual_seq_lengths_kv=ends,
            num_heads=query.shape[1],
            num_key_value_heads=key.shape[1],
            scale=scale,
            input_layout=layout,
            sparse_mode=0,
        )[0]
        return attended
