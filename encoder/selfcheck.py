"""The start-up proof: golden inputs through the chosen path, held against the fp32 reference.

Two layers. The tower's own vectors show that the whole path is right. But a model with flat attention hides an
attention fault, so each mask need of the tower is also tried alone, on sharp queries and keys of its head dims.
"""

import math
from dataclasses import dataclass

import numpy as np
import torch

from encoder.attention.backend import AttentionCall, MaskNeed, Segments, dtype_name
from encoder.attention.dispatch import Dispatcher
from encoder.attention.reference import ReferenceAttention
from encoder.outputs import normalize_rows

# dtype: (least cosine, greatest absolute error on vectors of length 1)
TOWER_THRESHOLDS = {
    "float32": (0.999999, 1e-4),
    "bfloat16": (0.998, 2e-2),
    "float16": (0.9998, 5e-3),
    "int8": (0.99, 5e-2),
    "reduced": (0.98, 1e-1),
}
# dtype: (least cosine, greatest absolute error on attended values of about 1)
ATTENTION_THRESHOLDS = {"float32": (0.999999, 1e-4), "bfloat16": (0.999, 6e-2), "float16": (0.9999, 1e-2)}
# Both sides of 512 keys: masks were ignored past that on some devices (vllm-ascend #15503).
CHECKED_LENGTHS = (50, 577)


@dataclass(frozen=True)
class CheckResult:
    """One comparison: the worst cosine and the greatest absolute error, with the thresholds that were asked."""

    tower: str
    backend: str
    runner: str
    dtype: str
    mask_need: str
    worst_cosine: float
    max_abs_error: float
    cosine_threshold: float
    max_abs_threshold: float
    detail: str

    @property
    def passed(self) -> bool:
        """NaN passes no comparison."""
        return self.worst_cosine >= self.cosine_threshold and self.max_abs_error <= self.max_abs_threshold

    def describe(self) -> str:
        """One line for logs and errors."""
        return (
            f"{self.tower} {self.detail} with {self.backend}/{self.runner} {self.dtype}, "
            f"mask {self.mask_need}: cosine {self.worst_cosine:.6f} (at least {self.cosine_threshold}), "
            f"max error {self.max_abs_error:.2e} (at most {self.max_abs_threshold:.0e})"
        )


def compare_rows(found: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Worst cosine and greatest absolute error between the rows of two [n, D] arrays; NaN when one holds a NaN."""
    found64, expected64 = found.astype(np.float64), expected.astype(np.float64)
    lengths = np.linalg.norm(found64, axis=1) * np.linalg.norm(expected64, axis=1)
    same_zero = (np.abs(found64).max(axis=1) == 0) & (np.abs(expected64).max(axis=1) == 0)
    products = (found64 * expected64).sum(axis=1)
    cosines = np.where(same_zero, 1.0, products / np.where(lengths == 0, 1.0, lengths))
    return float(cosines.min()), float(np.abs(found64 - expected64).max())


def check_vectors(
    found: np.ndarray,
    expected: np.ndarray,
    *,
    tower: str,
    backend: str,
    runner: str,
    dtype: str,
    mask_need: str,
    detail: str,
) -> CheckResult:
    """Holds vectors [n, D] of the chosen path against those of the reference, both normalised."""
    cosine, error = compare_rows(normalize_rows(found), normalize_rows(expected))
    least, most = TOWER_THRESHOLDS[dtype]
    return CheckResult(tower, backend, runner, dtype, mask_need, cosine, error, least, most, detail)


def check_attention(
    dispatcher: Dispatcher, *, device: str, dtype: torch.dtype, head_dim: int, need: MaskNeed, tower: str
) -> CheckResult:
    """One attention call of a mask need, at lengths on both sides of 512, against the reference."""
    cosines, errors = [], []
    with torch.inference_mode(), dispatcher.forward() as trace:
        for tokens in CHECKED_LENGTHS:
            call = sharp_call(need, tokens, head_dim, device, dtype)
            found = dispatcher.attend(call).float().cpu()
            expected = ReferenceAttention().attend(sharp_call(need, tokens, head_dim, "cpu", dtype)).float()
            cosine, error = compare_rows(found.flatten(0, 2).numpy(), expected.flatten(0, 2).numpy())
            cosines.append(cosine)
            errors.append(error)
    name = dtype_name(dtype)
    least, most = ATTENTION_THRESHOLDS[name]
    took = dispatcher.resolved.name if trace.reason is None else f"fallback ({trace.reason})"
    return CheckResult(
        tower, took, "eager", name, str(need), min(cosines), max(errors), least, most, f"attention head_dim {head_dim}"
    )


def sharp_call(need: MaskNeed, tokens: int, head_dim: int, device: str, dtype: torch.dtype) -> AttentionCall:
    """A call by formula whose softmax picks a few keys each, so that a lost mask or a wrong scale shows at once."""
    position = torch.arange(tokens, dtype=torch.float64)[:, None]
    channel = torch.arange(head_dim, dtype=torch.float64)[None, :]
    angle = position * (0.37 + 0.11 * channel) + channel
    query, key = torch.cos(angle) * 2, torch.cos(angle + 0.6) * 2
    value = torch.sin(0.05 * position * (channel + 1)) + 0.5 * torch.cos(position)
    heads = [torch.stack([t, t.roll(1, dims=0)])[None] for t in (query, key, value)]
    query, key, value = (t.to(dtype).to(device) for t in heads)
    scale = 1 / math.sqrt(head_dim)
    mask: torch.Tensor | None = None
    segments: Segments | None = None
    seen = torch.arange(tokens) < tokens - tokens // 3
    if need is MaskNeed.KEY_PADDING:
        mask = seen[None, None, None, :].to(device)
    elif need is MaskNeed.ADDITIVE:
        mask = (
            torch.where(seen, 0.0, float("-inf"))[None, None, None, :].expand(1, 1, tokens, tokens).to(dtype).to(device)
        )
    elif need is MaskNeed.SEGMENTS:
        segments = Segments.from_lengths([tokens // 4, tokens // 2, tokens - tokens // 4 - tokens // 2], device)
    return AttentionCall(
        query, key, value, scale, mask,
        is_causal=need is MaskNeed.CAUSAL,
        segments=segments,
        window=(tokens // 8, tokens // 8) if need is MaskNeed.WINDOWS else None,
    )  # fmt: skip
