"""The bridge to transformers, argument by argument: each is honoured or refused, and none is swallowed."""

from typing import Any

import pytest
import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

from encoder.attention.dispatch import Dispatcher
from encoder.attention.hf import ATTENTION_NAME, attending, attention, register_bridge
from encoder.attention.reference import ReferenceAttention
from encoder.attention.resolve import ResolvedBackend

TOKENS = 7
PADDING = torch.tensor([True] * 4 + [False] * 3)[None, None, None, :]
TRIANGLE = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril()


class Module(torch.nn.Module):
    def __init__(self, is_causal: bool) -> None:
        super().__init__()
        self.is_causal = is_causal


def tensors() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(2, 2, TOKENS, 8, generator=generator) * 2 for _ in range(3)]


def attended(*, mask: torch.Tensor | None = None, causal_module: bool = False, **asked: Any) -> torch.Tensor:
    """[B, H, S, D] through the bridge and the reference backend."""
    chosen = ResolvedBackend("reference", "server", "a test", ReferenceAttention.capabilities)
    with attending(Dispatcher(chosen)):
        found, weights = attention(Module(causal_module), *tensors(), mask, **asked)
    assert weights is None
    return found.transpose(1, 2)


def written_out(scale: float, seen: torch.Tensor | None = None) -> torch.Tensor:
    query, key, value = (t.double() for t in tensors())
    scores = query @ key.transpose(-1, -2) * scale
    if seen is not None:
        scores = scores.masked_fill(~seen, float("-inf"))
    return (torch.softmax(scores, dim=-1) @ value).float()


@pytest.mark.parametrize(("scaling", "scale"), [(None, 8**-0.5), (0.9, 0.9), (0.05, 0.05)])
def test_the_scale_is_the_models_own(scaling: float | None, scale: float) -> None:
    assert (attended(scaling=scaling) - written_out(scale)).abs().max() <= 1e-5


@pytest.mark.parametrize(
    ("mask", "causal_module", "is_causal", "seen"),
    [
        (None, False, None, None),
        (None, True, None, TRIANGLE),  # a module says so itself, and there is no mask to hold it
        (PADDING, True, None, PADDING),  # transformers' rule: a mask that is given holds the causal part already
        (PADDING, False, True, PADDING & TRIANGLE),  # what the call asks for is honoured beside any mask
        (None, False, True, TRIANGLE),
        (None, True, False, None),
        (PADDING, False, None, PADDING),
    ],
)
def test_masks_and_causality(
    mask: torch.Tensor | None, causal_module: bool, is_causal: bool | None, seen: torch.Tensor | None
) -> None:
    found = attended(mask=mask, causal_module=causal_module, is_causal=is_causal)
    assert (found - written_out(8**-0.5, seen)).abs().max() <= 1e-5


@pytest.mark.parametrize(
    "asked",
    [
        {"dropout": 0.1},
        {"position_bias": torch.zeros(1)},
        {"sliding_window": 4},
        {"softcap": 30.0},
        {"output_attentions": True},
    ],
    ids=lambda asked: next(iter(asked)),
)
def test_what_no_backend_computes_is_refused_by_name(asked: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"asked for {next(iter(asked))}, which no backend here computes"):
        attended(**asked)


def test_an_argument_that_nobody_knows_is_an_error() -> None:
    with pytest.raises(TypeError, match="rope_scaling"):
        attended(rope_scaling=2.0)


def test_outside_an_engine_there_is_no_attention() -> None:
    with pytest.raises(RuntimeError, match="outside an engine"):
        attention(Module(False), *tensors(), None)


def test_a_name_is_registered_with_its_masks() -> None:
    """A name without an entry among the masks gets no mask at all."""
    register_bridge()
    assert AttentionInterface()[ATTENTION_NAME] is attention
    assert AttentionMaskInterface()[ATTENTION_NAME] is sdpa_mask
