"""Ascend's fused attention, `npu_fused_infer_attention_score` (torch_npu 2.13).

It takes no mask here: a masked call goes to SDPA. Lengths go by keyword, since a captured graph can update only those.
Head dims are padded to 64 or 128, and the scale stays that of the true head dim. Not for 310P, which lacks it.
Older CANN takes packed segments with head dim 192 alone and refuses these: the self-check then demotes this backend.
"""

from collections.abc import Mapping
from typing import ClassVar

import torch
import torch.nn.functional as F

from encoder.attention.backend import AttentionBackend, AttentionCall, Capabilities, HeadDims, MaskNeed
from encoder.device import Device


class AscendAttention(AttentionBackend):
    """Unmasked batches (layout BSND) and packed segments (TND), fp16 and bf16, on A2 and A3 chips."""

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
        if call.segments is not None:
            if call.segments.host is None:
                return "no host lengths"
            if call.segments.host[-1] != call.query.shape[-2]:
                return "segments end before the last token"
        return super().refusal(call)

    def attend(self, call: AttentionCall) -> torch.Tensor:
        head_dim = call.query.shape[-1]
        missing = self.capabilities.head_dims.padded(head_dim) - head_dim
        # The models' own layout is [B, S, H, D], so that turning it around copies nothing.
        query, key, value = (t.transpose(1, 2) for t in (call.query, call.key, call.value))
        if missing:
            query, key, value = (F.pad(t, (0, missing)) for t in (query, key, value))
        if call.segments is None:
            attended = self._fused(query, key, value, call.scale, "BSND", {})
        else:
            assert call.segments.host is not None
            ends = list(call.segments.host[1:])
            lengths = {"actual_seq_lengths": ends, "actual_seq_lengths_kv": ends}
            attended = self._fused(query[0], key[0], value[0], call.scale, "TND", lengths)[None]
        return attended[..., :head_dim].transpose(1, 2)

    @staticmethod
    def _fused(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        layout: str,
        lengths: Mapping[str, list[int]],
    ) -> torch.Tensor:
        """The operator without a mask; heads are the last dimension but one in both layouts.

        `lengths` is empty without segments: a graph's update writes into every call that names them.
        """
        import torch_npu

        attended: torch.Tensor = torch_npu.npu_fused_infer_attention_score(
            query.contiguous(),
            key.contiguous(),
            value.contiguous(),
            num_heads=query.shape[-2],
            num_key_value_heads=key.shape[-2],
            scale=scale,
            input_layout=layout,
            sparse_mode=0,
            **lengths,
        )[0]
        return attended
