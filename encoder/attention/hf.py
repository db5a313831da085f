"""The bridge to transformers: one attention name that serves every family.

transformers asks two registries by the same name. `AttentionInterface` gives the attention function;
`AttentionMaskInterface` gives the mask, and a name that is missing there gets **no mask at all**. And where nothing is
padded, a causal mask arrives only as `is_causal=True` with no mask tensor (transformers 5.24, `masking_utils`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch

from encoder.attention.backend import ITEM_BOUNDARIES, AttentionCall
from encoder.attention.dispatch import NO_SEGMENTS, CallTrace, Dispatcher, SegmentsByName

ATTENTION_NAME = "vitfleet"

_active: ContextVar[Dispatcher] = ContextVar("vitfleet_dispatcher")


def register_bridge() -> None:
    """Makes ATTENTION_NAME known to transformers, with masks; harmless when done twice."""
    from transformers import AttentionInterface, AttentionMaskInterface
    from transformers.masking_utils import sdpa_mask

    AttentionInterface.register(ATTENTION_NAME, attention)
    AttentionMaskInterface.register(ATTENTION_NAME, sdpa_mask)


@contextmanager
def attending(dispatcher: Dispatcher, segments: SegmentsByName = NO_SEGMENTS) -> Iterator[CallTrace]:
    """Inside, every attention of a model that was loaded with ATTENTION_NAME goes through `dispatcher`.

    `segments`: the boundaries of a packed batch, by name.
    """
    token = _active.set(dispatcher)
    try:
        with dispatcher.forward(segments) as trace:
            yield trace
    finally:
        _active.reset(token)


def attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    position_bias: torch.Tensor | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    output_attentions: bool | None = None,
    output_hidden_states: bool | None = None,
    position_ids: torch.Tensor | None = None,
    boundaries: str = ITEM_BOUNDARIES,
) -> tuple[torch.Tensor, None]:
    """What transformers calls in each layer; an argument that is not named here is a TypeError, never swallowed.

    query, key, value: [B, H, S, D]; returns ([B, S, H, D], None). `boundaries`: in a packed batch, the name of those
    that this layer attends by. Raises ValueError for what this project never asks, and KeyError for boundaries that a
    packed batch does not have.
    """
    refused = {
        "dropout": dropout or None,
        "position_bias": position_bias,
        "softcap": softcap,
        "output_attentions": output_attentions or None,
        "sliding_window": sliding_window,
    }
    asked = [name for name, given in refused.items() if given is not None]
    if asked:
        raise ValueError(f"attention was asked for {', '.join(asked)}, which no backend here computes")
    dispatcher = _active.get(None)
    if dispatcher is None:
        raise RuntimeError("attention was called outside an engine: run the model inside `attending(dispatcher)`")
    if is_causal is None:
        # transformers' rule for a module that only says so itself: a mask that is given holds the causal part already.
        is_causal = bool(getattr(module, "is_causal", True)) and attention_mask is None
    call = AttentionCall(
        query=query,
        key=key,
        value=value,
        scale=query.shape[-1] ** -0.5 if scaling is None else scaling,
        mask=attention_mask,
        # Asked for by the call, it is honoured beside any mask: twice the same triangle is the same triangle.
        is_causal=is_causal and query.shape[-2] > 1,
        segments=dispatcher.segments[boundaries] if dispatcher.segments else None,
    )
    return dispatcher.attend(call).transpose(1, 2), None
