"""torch's scaled_dot_product_attention: takes every mask on every device, and is the fallback of all other backends."""

from itertools import pairwise
from typing import ClassVar

import torch
import torch.nn.functional as F

from encoder.attention.backend import ALL_NEEDS, AttentionBackend, AttentionCall, Capabilities
from encoder.attention.masks import allowed, clear_unseen_keys, dense_mask
from encoder.device import Device


class SdpaAttention(AttentionBackend):
    """SDPA with boolean masks kept boolean (float ones take the slow path on Ascend), packed segments one by one."""

    name = "sdpa"
    capabilities: ClassVar[Capabilities] = Capabilities(
        mask_needs=ALL_NEEDS, dtypes=frozenset({"float32", "bfloat16", "float16", "float64"})
    )

    @classmethod
    def unavailable(cls, device: Device) -> str | None:
        return None

    def attend(self, call: AttentionCall) -> torch.Tensor:
        segments = call.segments
        if segments is not None and segments.host is not None and not segments.replayed and call.mask is None:
            return self._attend_segments(call, segments.host)
        if call.mask is None and call.window is None and call.segments is None:
            return self._sdpa(call.query, call.key, call.value, call.scale, is_causal=call.is_causal)
        mask = dense_mask(call)
        assert mask is not None
        key, value = clear_unseen_keys(mask, call.key, call.value)
        sees_nothing = ~allowed(mask).any(dim=-1, keepdim=True)
        # A row without any key is NaN in some kernels; let it see all, then write the zeros it stands for.
        opened = mask | sees_nothing if mask.dtype == torch.bool else mask.masked_fill(sees_nothing, 0)
        if opened.dtype != torch.bool:
            opened = opened.to(call.query.dtype)
        attended = self._sdpa(call.query, key, value, call.scale, mask=opened)
        return attended.masked_fill(sees_nothing, 0)

    def _attend_segments(self, call: AttentionCall, boundaries: tuple[int, ...]) -> torch.Tensor:
        """Each segment alone: no [T, T] mask is made, and tokens past the last boundary give zeros."""
        attended = torch.zeros_like(call.query)
        for start, end in pairwise(boundaries):
            if start == end:
                continue
            part = AttentionCall(
                query=call.query[:, :, start:end],
                key=call.key[:, :, start:end],
                value=call.value[:, :, start:end],
                scale=call.scale,
                is_causal=call.is_causal,
                window=call.window,
            )
            attended[:, :, start:end] = self.attend(part)
        return attended

    @staticmethod
    def _sdpa(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        scale: float,
        mask: torch.Tensor | None = None,
        is_causal: bool = False,
    ) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        if groups > 1:
            key, value = key.repeat_interleave(groups, dim=1), value.repeat_interleave(groups, dim=1)
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=is_causal, scale=scale)
