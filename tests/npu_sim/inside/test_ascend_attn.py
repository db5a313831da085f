"""The Ascend backend on real npu tensors, by the dispatcher: values against the fp32 reference, and the call log."""

import dataclasses
import math

import pytest
import torch

from encoder.attention.ascend_attn import AscendAttention
from encoder.attention.backend import AttentionCall, Segments
from encoder.attention.dispatch import Dispatcher
from encoder.attention.reference import ReferenceAttention
from encoder.attention.resolve import ResolvedBackend
from tests.attention.test_backends import NEEDS, call_for
from tests.npu_sim.simulator import Misbehaviour, Simulator

# One step of rounding at the greatest values, which are below 8.
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 4e-2, torch.float16: 6e-3}
HEAD_DIMS = {64: 64, 72: 128, 80: 128, 88: 128, 128: 128}  # true and padded
FUSED_NEEDS = ("none", "segments")
REASONS = {
    "causal": "mask need causal",
    "key_padding": "mask need key_padding",
    "causal+key_padding": "mask need causal+key_padding",
    "windows": "mask need windows",
    "boolean": "mask need additive",
    "additive": "mask need additive",
}


def dispatcher(*, strict: bool = False) -> Dispatcher:
    chosen = ResolvedBackend("ascend_attn", "server", "a test", AscendAttention.capabilities)
    return Dispatcher(chosen, strict=strict)


def on_npu(call: AttentionCall, device: str = "npu:0") -> AttentionCall:
    """The same call with all tensors on the device."""
    segments = call.segments
    if segments is not None:
        segments = dataclasses.replace(segments, cu_seqlens=segments.cu_seqlens.to(device))
    return AttentionCall(
        query=call.query.to(device),
        key=call.key.to(device),
        value=call.value.to(device),
        scale=call.scale,
        mask=None if call.mask is None else call.mask.to(device),
        is_causal=call.is_causal,
        segments=segments,
        window=call.window,
    )


def expected(call: AttentionCall) -> torch.Tensor:
    return ReferenceAttention().attend(call).float()


@pytest.mark.parametrize("tokens", [50, 511, 513])
@pytest.mark.parametrize("head_dim", HEAD_DIMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("need", NEEDS)
def test_every_call_is_right_and_goes_where_it_may(
    need: str, dtype: torch.dtype, head_dim: int, tokens: int, simulator: Simulator
) -> None:
    call = call_for(need, tokens, head_dim, dtype)
    to = dispatcher()
    with torch.inference_mode(), to.forward() as trace:
        found = to.attend(on_npu(call))
    assert found.device == torch.device("npu:0") and found.dtype == dtype and found.shape == call.query.shape
    assert (found.cpu().float() - expected(call)).abs().max() <= TOLERANCE[dtype]
    fused, sdpa = simulator.calls.fused, simulator.calls.sdpa
    if need not in FUSED_NEEDS:
        assert not fused and sdpa
        assert (trace.fused, dict(trace.fallback)) == (0, {REASONS[need]: 1})
        # A float mask leaves the device's quick path: only a mask that came as float may be one.
        assert any(one.float_mask for one in sdpa) == (need == "additive")
        return
    assert len(fused) == 1 and not sdpa and (trace.fused, trace.reason) == (1, None)
    one = fused[0]
    assert one.scale == pytest.approx(1 / math.sqrt(head_dim), rel=1e-6)
    assert one.mask_shape is None and one.query_shape[-1] == one.key_shape[-1] == HEAD_DIMS[head_dim]
    assert (one.num_heads, one.num_key_value_heads, one.sparse_mode) == (2, 2, 0)
    if need == "segments":
        assert call.segments is not None and call.segments.host is not None
        assert one.layout == "TND" and one.lengths == one.lengths_kv == call.segments.host[1:]
        assert one.lengths is not None and one.lengths[-1] == tokens
    else:
        assert (one.layout, one.lengths, one.lengths_kv) == ("BSND", None, None)


@pytest.mark.parametrize("need", FUSED_NEEDS)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_grouped_heads(need: str, head_dim: int, simulator: Simulator) -> None:
    call = call_for(need, 40, head_dim, torch.bfloat16)
    call = dataclasses.replace(call, query=torch.cat([call.query, call.query.flip(2)], dim=1))
    with torch.inference_mode():
        found = dispatcher().attend(on_npu(call))
    assert (found.cpu().float() - expected(call)).abs().max() <= TOLERANCE[torch.bfloat16]
    assert [(one.num_heads, one.num_key_value_heads) for one in simulator.calls.fused] == [(4, 2)]


def test_tensors_as_models_hold_them_are_not_copied() -> None:
    """Models make [B, S, H, D] and turn it around for attention; the backend turns it back, and so for its answer."""
    by_token = torch.randn(2, 30, 4, 64).bfloat16().to("npu:0")
    query = by_token.transpose(1, 2)
    with torch.inference_mode():
        found = dispatcher().attend(AttentionCall(query, query, query, 0.125))
    assert found.transpose(1, 2).is_contiguous()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_the_operator_does_not_take_falls_back(dtype: torch.dtype, simulator: Simulator) -> None:
    wide = dtype == torch.bfloat16
    call = call_for("none", 20, 192 if wide else 64, dtype)
    to = dispatcher()
    with torch.inference_mode(), to.forward() as trace:
        found = to.attend(on_npu(call))
    assert (found.cpu().float() - expected(call)).abs().max() <= TOLERANCE[dtype]
    assert trace.reason == ("head_dim 192" if wide else "dtype float32") and not simulator.calls.fused


def test_segments_without_host_lengths_fall_back(simulator: Simulator) -> None:
    call = call_for("segments", 60, 64, torch.bfloat16)
    assert call.segments is not None
    to = dispatcher()
    with torch.inference_mode(), to.forward() as trace:
        found = to.attend(on_npu(dataclasses.replace(call, segments=dataclasses.replace(call.segments, host=None))))
    assert (found.cpu().float() - expected(call)).abs().max() <= TOLERANCE[torch.bfloat16]
    assert trace.reason == "no host lengths" and not simulator.calls.fused
    assert simulator.calls.sdpa and not any(one.float_mask for one in simulator.calls.sdpa)


def test_segments_that_end_early_fall_back_and_leave_zeros(simulator: Simulator) -> None:
    """The operator wants the last end to be T; a call that does not give it must not reach it."""
    call = call_for("none", 20, 64, torch.bfloat16)
    query, key, value = (t[:1] for t in (call.query, call.key, call.value))
    short = AttentionCall(query, key, value, call.scale, segments=Segments.from_lengths([7, 9], "cpu"))
    to = dispatcher()
    with torch.inference_mode(), to.forward() as trace:
        found = to.attend(on_npu(short)).cpu().float()
    assert (found - expected(short)).abs().max() <= TOLERANCE[torch.bfloat16]
    assert torch.count_nonzero(found[:, :, 16:]) == 0
    assert trace.reason == "segments end before the last token" and not simulator.calls.fused


@pytest.mark.parametrize("need", ["none", "segments"])
def test_no_layer_waits_for_the_device(need: str, simulator: Simulator) -> None:
    """Whatever would wait for the device raises while a graph is captured: three layers of calls do not."""
    call = on_npu(call_for(need, 48, 72, torch.bfloat16))
    to = dispatcher()
    graph = torch.npu.NPUGraph()
    with torch.inference_mode():
        with torch.npu.graph(graph):
            out = call.query
            for _ in range(3):
                out = to.attend(dataclasses.replace(call, query=out))
        graph.replay()
    assert torch.isfinite(out.cpu()).all()
    assert [one.phase for one in simulator.calls.fused] == ["capture"] * 3 + ["replay"] * 3


@pytest.mark.parametrize("need", ["causal", "key_padding", "windows"])
@pytest.mark.parametrize("packed", [False, True])
def test_no_fallback_waits_for_the_device(need: str, packed: bool) -> None:
    """Nor does SDPA in a captured graph, where packed boundaries are read from the device."""
    call = call_for(need, 48, 64, torch.bfloat16)
    if packed and need != "key_padding":
        query, key, value = (t[:1] for t in (call.query, call.key, call.value))
        segments = dataclasses.replace(Segments.from_lengths([20, 28], "cpu"), replayed=True)
        call = dataclasses.replace(call, query=query, key=key, value=value, segments=segments)
    there = on_npu(call)
    graph = torch.npu.NPUGraph()
    with torch.inference_mode():
        with torch.npu.graph(graph):
            out = dispatcher().attend(there)
        graph.replay()
    assert (out.cpu().float() - expected(call)).abs().max() <= TOLERANCE[torch.bfloat16]


def test_a_captured_fallback_follows_new_boundaries() -> None:
    """Boundaries of the capture must not be baked in where nobody hands new ones over."""
    call = dataclasses.replace(call_for("segments", 40, 64, torch.bfloat16), is_causal=True)
    first, second = (Segments.from_lengths(lengths, "npu:0") for lengths in ([10, 30], [25, 15]))
    captured = on_npu(dataclasses.replace(call, segments=dataclasses.replace(first, replayed=True)))
    graph = torch.npu.NPUGraph()
    with torch.inference_mode():
        with torch.npu.graph(graph):
            out = dispatcher().attend(captured)
        for segments in (first, second):
            captured.segments.cu_seqlens.copy_(segments.cu_seqlens)  # type: ignore[union-attr]
            graph.replay()
            at_home = dataclasses.replace(segments, cu_seqlens=segments.cu_seqlens.cpu())
            wanted = expected(dataclasses.replace(call, segments=at_home))
            assert (out.cpu().float() - wanted).abs().max() <= TOLERANCE[torch.bfloat16]


def test_an_update_leaves_calls_without_lengths_alone(simulator: Simulator) -> None:
    """One update goes to all calls of a graph: a batch call between packed ones must not take their lengths."""
    packed = call_for("segments", 20, 64, torch.bfloat16)
    plain = call_for("none", 12, 64, torch.bfloat16)
    inputs = [on_npu(packed), on_npu(plain)]
    graph = torch.npu.NPUGraph()
    to = dispatcher()
    with torch.inference_mode():
        with torch.npu.graph(graph, auto_dispatch_capture=True):
            outs = [to.attend(call) for call in inputs]
        ends = [3, 9, 15, 20]
        graph.update(cpu_update_input=[{"actual_seq_lengths": ends, "actual_seq_lengths_kv": ends}])
        graph.replay()
    moved = dataclasses.replace(packed, segments=Segments.from_lengths([3, 6, 6, 5], "cpu"))
    for out, call in zip(outs, (moved, plain), strict=True):
        assert (out.cpu().float() - expected(call)).abs().max() <= TOLERANCE[torch.bfloat16]
    assert [one.lengths for one in simulator.calls.fused if one.phase == "replay"] == [(3, 9, 15, 20), None]


def test_masked_calls_are_right_where_the_operator_ignores_masks(simulator: Simulator) -> None:
    call = call_for("key_padding", 700, 64, torch.bfloat16)
    with simulator.misbehaving(Misbehaviour.MASK_IGNORED_PAST_512), torch.inference_mode():
        found = dispatcher().attend(on_npu(call))
    assert (found.cpu().float() - expected(call)).abs().max() <= TOLERANCE[torch.bfloat16]


def test_on_the_second_device(simulator: Simulator) -> None:
    call = call_for("segments", 30, 80, torch.float16)
    with torch.inference_mode():
        found = dispatcher().attend(on_npu(call, "npu:1"))
    assert found.device == torch.device("npu:1") and simulator.calls.fused[0].device == 1
    assert (found.cpu().float() - expected(call)).abs().max() <= TOLERANCE[torch.float16]
