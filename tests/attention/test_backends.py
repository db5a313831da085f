"""Every backend that runs here, every mask need, against attention written out in float64 with numpy."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.attention.backend import AttentionCall, MaskNeed, Segments, is_key_padding
from encoder.attention.registry import backend_class
from encoder.attention.sdpa import SdpaAttention

TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 3e-2, torch.float16: 4e-3}


def written_out(call: AttentionCall) -> np.ndarray:
    """Attention by loops over heads and queries in float64; knows each mask in its own words."""
    query, key, value = (t.double().numpy() for t in (call.query, call.key, call.value))
    batch, heads, queries, _ = query.shape
    keys, groups = key.shape[2], heads // key.shape[1]
    out = np.zeros((batch, heads, queries, value.shape[-1]))
    mask = None if call.mask is None else call.mask if call.mask.dtype == torch.bool else call.mask.double()
    mask = None if mask is None else np.broadcast_to(mask.numpy(), (batch, heads, queries, keys))
    for b in range(batch):
        for h in range(heads):
            for i in range(queries):
                seen = [
                    j
                    for j in range(keys)
                    if not (call.is_causal and j > i)
                    and (call.window is None or -call.window[0] <= j - i <= call.window[1])
                    and (call.segments is None or same_segment(call.segments.host, i, j))
                    and (mask is None or (mask[b, h, i, j] if mask.dtype == bool else mask[b, h, i, j] > -np.inf))
                ]
                if not seen:
                    continue
                scores = np.array([query[b, h, i] @ key[b, h // groups, j] * call.scale for j in seen])
                if mask is not None and mask.dtype != bool:
                    scores += np.array([mask[b, h, i, j] for j in seen])
                weights = np.exp(scores - scores.max())
                out[b, h, i] = weights / weights.sum() @ value[b, h // groups, seen]
    return out


def same_segment(boundaries: tuple[int, ...] | None, i: int, j: int) -> bool:
    assert boundaries is not None
    return any(a <= i < b and a <= j < b for a, b in pairwise(boundaries))


def tensors(tokens: int, head_dim: int, dtype: torch.dtype, batch: int = 2, heads: int = 2) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(tokens * 1000 + head_dim)
    return [(torch.randn(batch, heads, tokens, head_dim, generator=generator) * 1.5).to(dtype) for _ in range(3)]


def call_for(need: str, tokens: int, head_dim: int, dtype: torch.dtype) -> AttentionCall:
    query, key, value = tensors(tokens, head_dim, dtype, batch=1 if need == "segments" else 2)
    scale = 1 / math.sqrt(head_dim)
    generator = torch.Generator().manual_seed(5)
    if need == "none":
        return AttentionCall(query, key, value, scale)
    if need == "causal":
        return AttentionCall(query, key, value, scale, is_causal=True)
    if need == "key_padding":
        kept = torch.tensor([tokens, max(1, tokens // 3)])
        mask = (torch.arange(tokens)[None, :] < kept[:, None])[:, None, None, :]
        return AttentionCall(query, key, value, scale, mask)
    if need == "causal+key_padding":
        padded = call_for("key_padding", tokens, head_dim, dtype)
        return AttentionCall(query, key, value, scale, padded.mask, is_causal=True)
    if need == "segments":
        lengths = [tokens // 5, 0, tokens // 2, tokens - tokens // 5 - tokens // 2]
        return AttentionCall(query, key, value, scale, segments=Segments.from_lengths(lengths, "cpu"))
    if need == "windows":
        return AttentionCall(query, key, value, scale, window=(3, 2))
    if need == "boolean":
        mask = torch.rand(2, 1, tokens, tokens, generator=generator) > 0.6
        mask[0, :, 1] = False  # a query that may see nothing
        return AttentionCall(query, key, value, scale, mask)
    if need == "additive":
        bias = torch.randn(1, 2, tokens, tokens, generator=generator) * 2
        bias[:, :, :, -1] = float("-inf")
        return AttentionCall(query, key, value, scale, bias.to(dtype))
    raise AssertionError(need)


NEEDS = ["none", "causal", "key_padding", "causal+key_padding", "segments", "windows", "boolean", "additive"]


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 80, 88, 128])
@pytest.mark.parametrize("need", NEEDS)
@pytest.mark.parametrize("name", ["reference", "sdpa"])
def test_backend_equals_attention_written_out(name: str, need: str, head_dim: int, dtype: torch.dtype) -> None:
    call = call_for(need, 17, head_dim, dtype)
    found = backend_class(name)().attend(call)
    assert found.dtype == dtype and found.shape == call.query.shape
    assert np.abs(found.double().numpy() - written_out(call)).max() <= TOLERANCE[dtype]


@pytest.mark.parametrize("need", NEEDS)
def test_the_reference_may_take_its_queries_in_parts(need: str, monkeypatch: pytest.MonkeyPatch) -> None:
    call = call_for(need, 50, 16, torch.float32)
    whole = backend_class("reference")().attend(call)
    monkeypatch.setattr("encoder.attention.reference.SCORES_AT_ONCE", 7 * 50 * 4)
    assert torch.allclose(backend_class("reference")().attend(call), whole, atol=1e-6)


@pytest.mark.parametrize("tokens", [511, 512, 513, 700])
@pytest.mark.parametrize("need", NEEDS)
def test_sdpa_equals_the_reference_on_both_sides_of_512(need: str, tokens: int) -> None:
    call = call_for(need, tokens, 64, torch.float32)
    found, expected = backend_class("sdpa")().attend(call), backend_class("reference")().attend(call)
    assert (found - expected).abs().max() <= 2e-5


@pytest.mark.parametrize("name", ["reference", "sdpa"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_nan_in_padding_reaches_nobody(name: str, dtype: torch.dtype) -> None:
    clean = call_for("key_padding", 12, 64, dtype)
    query, key, value = (t.clone() for t in (clean.query, clean.key, clean.value))
    for tensor in (key, value):
        tensor[1, :, 4:] = float("nan")
    dirty = AttentionCall(query, key, value, clean.scale, clean.mask)
    backend = backend_class(name)()
    assert torch.equal(backend.attend(dirty), backend.attend(clean))
    assert torch.isfinite(backend.attend(dirty)).all()


@pytest.mark.parametrize("name", ["reference", "sdpa"])
@pytest.mark.parametrize("mask", [torch.zeros(1, 1, 9, 9, dtype=torch.bool), torch.full((1, 1, 9, 9), float("-inf"))])
def test_a_row_that_sees_nothing_is_zero_not_nan(name: str, mask: torch.Tensor) -> None:
    query, key, value = tensors(9, 64, torch.float32)
    assert torch.equal(
        backend_class(name)().attend(AttentionCall(query, key, value, 0.1, mask)), torch.zeros_like(query)
    )


@pytest.mark.parametrize("name", ["reference", "sdpa"])
@pytest.mark.parametrize("need", ["none", "causal", "key_padding", "additive"])
def test_grouped_heads(name: str, need: str) -> None:
    call = call_for(need, 11, 64, torch.float32)
    query = torch.cat([call.query, call.query.flip(2)], dim=1)  # four query heads on two key heads
    mask = None if call.mask is None or call.mask.shape[1] == 1 else torch.cat([call.mask] * 2, dim=1)
    grouped = AttentionCall(
        query, call.key, call.value, call.scale, mask if mask is not None else call.mask, call.is_causal
    )
    found = backend_class(name)().attend(grouped)
    assert np.abs(found.double().numpy() - written_out(grouped)).max() <= 2e-5


@pytest.mark.parametrize("name", ["reference", "sdpa"])
def test_inside_a_graph_segments_are_read_from_the_device(name: str) -> None:
    """No host lengths, and tokens past the last boundary: unseen by the others, zero themselves."""
    query, key, value = tensors(14, 64, torch.float32, batch=1)
    on_host = AttentionCall(query, key, value, 0.125, segments=Segments.from_lengths([4, 6], "cpu"))
    cu_seqlens = torch.tensor([0, 4, 10, 10, 10], dtype=torch.int32)  # fixed capacity, the tail repeats T
    on_device = AttentionCall(query, key, value, 0.125, segments=Segments(cu_seqlens, None, 6))
    found = backend_class(name)().attend(on_device)
    assert np.abs(found.double().numpy() - written_out(on_host)).max() <= 2e-5
    assert torch.equal(found[:, :, 10:], torch.zeros_like(found[:, :, 10:]))


@settings(max_examples=60, deadline=None)
@given(st.lists(st.integers(0, 9), min_size=1, max_size=6), st.booleans(), st.integers(0, 2**31))
def test_packed_segments_equal_each_alone(lengths: list[int], causal: bool, seed: int) -> None:
    total = sum(lengths)
    if total == 0:
        return
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(1, 2, total, 16, generator=generator) for _ in range(3))
    packed = SdpaAttention().attend(
        AttentionCall(query, key, value, 0.25, is_causal=causal, segments=Segments.from_lengths(lengths, "cpu"))
    )
    start = 0
    for length in lengths:
        if length:
            part = slice(start, start + length)
            alone = written_out(
                AttentionCall(query[:, :, part], key[:, :, part], value[:, :, part], 0.25, is_causal=causal)
            )
            assert np.abs(packed[:, :, part].double().numpy() - alone).max() <= 2e-5
        start += length


@settings(max_examples=60, deadline=None)
@given(st.integers(1, 8), st.integers(0, 2**31), st.floats(0, 1))
def test_random_boolean_masks(tokens: int, seed: int, density: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    query, key, value = (torch.randn(2, 2, tokens, 8, generator=generator) for _ in range(3))
    mask = torch.rand(2, 1, tokens, tokens, generator=generator) < density
    call = AttentionCall(query, key, value, 0.35, mask)
    assert np.abs(SdpaAttention().attend(call).double().numpy() - written_out(call)).max() <= 2e-5


def test_needs_are_read_from_the_call() -> None:
    query, key, value = tensors(4, 8, torch.float32)
    segments = Segments.from_lengths([1, 3], "cpu")
    padding = torch.tensor([True, True, False, False])[None, None, None, :]

    def needs(**asked: object) -> set[str]:
        return {str(n) for n in AttentionCall(query, key, value, 1.0, **asked).needs}  # type: ignore[arg-type]

    assert needs() == {"none"}
    assert needs(is_causal=True) == {"causal"}
    assert needs(mask=padding) == {"key_padding"}
    assert needs(mask=padding.expand(2, 1, 4, 4)) == {"key_padding"}
    assert needs(mask=padding, is_causal=True) == {"key_padding", "causal"}
    assert needs(mask=torch.ones(4, 4, dtype=torch.bool).tril()) == {"additive"}
    assert needs(mask=torch.zeros(1, 1, 1, 4)) == {"additive"}  # a float mask is a bias, whatever its shape
    assert needs(segments=segments, window=(1, 1)) == {"segments", "windows"}
    assert not is_key_padding(padding.expand(2, 3, 4, 4).contiguous())
    assert segments.cu_seqlens.tolist() == [0, 1, 4] and segments.max_length == 3


def test_mask_need_values_are_the_wire_contracts() -> None:
    assert {str(n) for n in MaskNeed} == {"none", "causal", "key_padding", "segments", "windows", "additive"}
