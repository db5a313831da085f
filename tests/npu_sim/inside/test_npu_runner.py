"""NPU graphs by torch_npu's own NPUGraph: right in any order, restored after a failed capture, within their limits."""

import dataclasses
import gc
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from encoder.attention.dispatch import Dispatcher, SegmentsByName
from encoder.attention.registry import backend_class
from encoder.attention.resolve import ResolvedBackend
from encoder.device import Device, open_device
from encoder.graphs import proof
from encoder.graphs.bucketed import BucketedForward
from encoder.graphs.captured import Captured
from encoder.graphs.eager import EagerRunner
from encoder.graphs.npu import NpuGraphRunner
from encoder.graphs.packing import packed_buckets
from encoder.graphs.runner import Bucket, GraphLimits
from encoder.models.checkpoint import find_checkpoint
from encoder.models.tower import Inputs, Tower, TowerOutput, load_tower
from encoder.settings import EngineSettings
from tests.npu_sim.simulator import Simulator
from tests.support.checkpoints import worst_cosine
from tests.support.packed_tower import LAYERS, PackedTower, alone, pictures, sharp_vit

PICTURES = [Bucket(1), Bucket(2), Bucket(4)]
PACKED = packed_buckets(16, [1, 3])[1:]  # 8, 16 and 48 tokens
DEMO_LAYERS = find_checkpoint("demo").config["vision_config"]["num_hidden_layers"]


@pytest.fixture(autouse=True)
def any_speed_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "SLOWER_THAN_EAGER", 1e9)


@pytest.fixture(autouse=True)
def nothing_left_behind() -> Any:
    yield
    gc.collect()
    torch.npu.empty_cache()


class Rig:
    """A tower on a device with its runners, as an engine puts them together."""

    def __init__(
        self,
        tower: Tower[Any],
        buckets: Sequence[Bucket],
        *,
        backend: str = "ascend_attn",
        kind: type[NpuGraphRunner] = NpuGraphRunner,
        limits: GraphLimits | None = None,
        index: int = 0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.device: Device = open_device("npu", index, 0)
        self.tower = tower
        tower.module.to(self.device.torch_name, dtype)
        decided = ResolvedBackend(backend, "server", "a test", backend_class(backend).capabilities)
        self.dispatcher = Dispatcher(decided)
        self.eager = EagerRunner(tower, self.dispatcher, self.device, dtype)
        self.runner = kind(tower, self.dispatcher, self.device, dtype)
        self.buckets, self.limits = buckets, limits
        self.said: list[str] = []

    def prepare(self) -> "Rig":
        self.forward = BucketedForward(self.runner, self.eager, self.buckets, self.limits)
        self.forward.prepare(self.tower.golden_items(), self.said.append)
        return self

    @property
    def states(self) -> list[str]:
        return [record.state for record in self.forward.records]

    @property
    def reasons(self) -> list[str]:
        return [record.reason for record in self.forward.records]

    def eagerly(self, items: Sequence[Any]) -> np.ndarray:
        return self.eager.run(Bucket(len(items)), self.tower.collate(items))[0].vectors.numpy()


def demo() -> Tower[Any]:
    return load_tower(find_checkpoint("demo"), EngineSettings.model_validate({}))


def packed(head_dim: int = 80) -> PackedTower:
    return PackedTower(sharp_vit(head_dim, 16), head_dim, 16)


def settled() -> bool:
    """Whether torch_npu is as it was before any capture."""
    on_default = torch.npu.current_stream() == torch.npu.default_stream()
    return on_default and not _get_current_dispatch_mode_stack() and not torch.npu.is_current_stream_capturing()


def test_pictures_of_one_size(simulator: Simulator) -> None:
    rig = Rig(demo(), PICTURES).prepare()
    assert rig.states == ["ready"] * 3, rig.reasons
    assert not simulator.calls.sdpa and all(record.memory_bytes > 0 for record in rig.forward.records[-1:])
    simulator.calls.clear()
    items = rig.tower.golden_items()
    for count in (1, 4, 2, 3, 1):
        found = rig.forward.run(items[:count])
        vectors, trace, name = found.vectors, found.trace, found.runner
        assert name == "npu" and trace.fused == DEMO_LAYERS and trace.reason is None
        assert worst_cosine(vectors, rig.eagerly(items[:count])) >= 0.9999
    replays = [call for call in simulator.calls.fused if call.phase == "replay"]
    assert [call.query_shape[0] for call in replays[::DEMO_LAYERS]] == [1, 4, 2, 4, 1]
    assert settled()


def test_packed_in_any_order_with_any_boundaries(simulator: Simulator) -> None:
    rig = Rig(packed(), PACKED).prepare()
    assert rig.states == ["ready"] * 3, rig.reasons
    assert not simulator.calls.sdpa
    module = sharp_vit(80, 16)
    for lengths in ([3, 4], [16, 16, 16], [4, 3], [7, 9], [9, 7], [16], [2, 14], [16, 5, 9], [1], [14, 2]):
        simulator.calls.clear()
        items = pictures(lengths, seed=sum(lengths) + len(lengths))
        found = rig.forward.run(items)
        vectors, trace, name = found.vectors, found.trace, found.runner
        assert name == "npu" and trace.fused == LAYERS
        assert worst_cosine(vectors, rig.eagerly(items)) >= 0.9999
        assert worst_cosine(vectors, np.stack([alone(module, item) for item in items])) >= 0.999
        of_the_graph = [call for call in simulator.calls.fused if call.phase != "eager"]
        assert [call.phase for call in of_the_graph] == ["update"] * LAYERS + ["replay"] * LAYERS
        ends = of_the_graph[-1].lengths
        assert ends is not None and list(ends[: len(lengths)]) == np.cumsum(lengths).tolist()
        assert ends[-1] == of_the_graph[-1].query_shape[0] and of_the_graph[-1].query_shape[-1] == 128
    assert settled()


@pytest.mark.parametrize("backend", ["sdpa", "reference"])
def test_packed_through_a_backend_that_reads_boundaries_on_the_device(backend: str, simulator: Simulator) -> None:
    """After a demotion the same graphs must serve, though nobody hands host lengths to SDPA."""
    rig = Rig(packed(), PACKED, backend=backend).prepare()
    assert rig.states == ["ready"] * 3, rig.reasons
    for lengths in ([7, 9], [9, 7], [16, 5, 9], [3]):
        items = pictures(lengths, seed=3)
        assert worst_cosine(rig.forward.run(items).vectors, rig.eagerly(items)) >= 0.9999
    assert not simulator.calls.fused and not any(call.float_mask for call in simulator.calls.sdpa)


def test_the_second_device_while_the_first_has_graphs(simulator: Simulator) -> None:
    first, second = Rig(packed(), PACKED).prepare(), Rig(packed(), PACKED, index=1).prepare()
    assert first.states == second.states == ["ready"] * 3, second.reasons
    simulator.calls.clear()
    for lengths in ([3, 4], [16, 5, 9], [4, 3]):
        items = pictures(lengths, seed=9)
        both = [rig.forward.run(items).vectors for rig in (second, first)]
        assert np.array_equal(*both)
    assert {call.device for call in simulator.calls.fused} == {0, 1}
    assert torch.npu.current_device() == 0 and settled()


def test_buckets_are_given_back(simulator: Simulator) -> None:
    rig = Rig(demo(), PICTURES)
    rig.eagerly(rig.tower.golden_items())
    gc.collect()
    torch.npu.empty_cache()
    memory, streams = simulator.runtime.used_memory(0), simulator.runtime.live_streams(0)
    rig.prepare()
    assert simulator.runtime.used_memory(0) > memory
    rig.forward.release()
    gc.collect()
    torch.npu.empty_cache()
    assert simulator.runtime.used_memory(0) <= memory
    assert simulator.runtime.live_streams(0) <= streams + 2  # the runner's own two
    assert rig.prepare().states == ["ready"] * 3  # and again, from an empty pool
    assert rig.runner.run(Bucket(1), rig.tower.gather(rig.tower.golden_items()[:1]))[0].vectors.isfinite().all()


def test_no_memory_at_capture(simulator: Simulator) -> None:
    """The largest buckets do not fit; they are served eager, and the report says with which backend and why."""
    rig = Rig(demo(), [Bucket(1), Bucket(2), Bucket(256)])
    rig.eagerly(rig.tower.golden_items())
    with simulator.memory_headroom(48 << 20):
        rig.prepare()
    assert rig.states == ["ready", "ready", "disabled"], rig.reasons
    assert rig.reasons[-1].startswith("capture with attention backend 'ascend_attn' failed: ")
    assert "out of memory" in rig.reasons[-1] and "eager fails at this size" in rig.reasons[-1]
    assert rig.forward.records[-1].backend == "ascend_attn" and any("out of memory" in line for line in rig.said)
    assert settled()
    items = rig.tower.golden_items()
    assert worst_cosine(rig.forward.run(items).vectors, rig.eagerly(items)) >= 0.9999


class OutOfMemoryInside(NpuGraphRunner):
    """Runs out in the middle of the capture of the largest bucket, where eager would still do."""

    def _capture(self, bucket: Bucket, inputs: Inputs) -> Captured:
        forward = self.tower.forward

        def greedy(given: Inputs) -> TowerOutput:
            output = forward(given)
            if bucket == max(PICTURES + PACKED) and torch.npu.is_current_stream_capturing():
                torch.empty(1 << 32, device=output.vectors.device)
            return output

        self.tower.forward = greedy  # type: ignore[method-assign]
        try:
            return super()._capture(bucket, inputs)
        finally:
            self.tower.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize(("tower", "buckets"), [(demo, PICTURES), (packed, PACKED)])
def test_no_memory_in_the_middle_of_a_capture(tower: Callable[[], Tower[Any]], buckets: list[Bucket]) -> None:
    rig = Rig(tower(), buckets, kind=OutOfMemoryInside).prepare()
    wanted = ["eager" if bucket == max(PICTURES + PACKED) else "ready" for bucket in buckets]
    assert rig.states == wanted, rig.reasons
    for state, reason in zip(rig.states, rig.reasons, strict=True):
        assert state == "ready" or ("'ascend_attn' failed: " in reason and "out of memory" in reason)
    items = rig.tower.golden_items()
    assert settled() and worst_cosine(rig.forward.run(items).vectors, rig.eagerly(items)) >= 0.9999


def test_no_streams_at_capture(simulator: Simulator) -> None:
    rig = Rig(packed(), PACKED).prepare()
    rig.forward.release()  # the runner's own streams stay
    gc.collect()
    with simulator.stream_headroom(2):
        rig.prepare()
    assert rig.states == ["eager", "ready", "ready"], rig.reasons
    assert rig.reasons[0].startswith("capture with attention backend 'ascend_attn' failed: ")
    assert "207008" in rig.reasons[0] and settled()
    for lengths in ([3, 4], [16, 5, 9], [4, 3], [9, 7]):
        items = pictures(lengths, seed=1)
        assert worst_cosine(rig.forward.run(items).vectors, rig.eagerly(items)) >= 0.9999


def test_graph_memory_is_capped_and_given_back(simulator: Simulator) -> None:
    sizes = [Bucket(1), Bucket(2), Bucket(96)]
    rig = Rig(demo(), sizes).prepare()
    held = [record.memory_bytes for record in rig.forward.records]
    alone = Rig(demo(), sizes[:2]).prepare().forward
    small = sum(record.memory_bytes for record in alone.records)
    assert 0 < small < held[-1]
    alone.release()
    rig.forward.release()
    gc.collect()
    torch.npu.empty_cache()
    before = simulator.runtime.used_memory(0)
    rig.limits = GraphLimits(memory_bytes=(small + held[-1]) // 2)
    rig.prepare()
    assert rig.states == ["ready", "ready", "eager"], rig.reasons
    assert rig.reasons[-1].startswith("its graph takes ") and "graph_memory_bytes leaves" in rig.reasons[-1]
    gc.collect()
    torch.npu.empty_cache()
    assert 0 < simulator.runtime.used_memory(0) - before <= rig.limits.memory_bytes  # type: ignore[operator]
    items = rig.tower.golden_items() * 10
    assert worst_cosine(rig.forward.run(items).vectors, rig.eagerly(items)) >= 0.9999


def test_graphs_are_counted() -> None:
    rig = Rig(demo(), PICTURES, limits=GraphLimits(max_graphs=1)).prepare()
    assert rig.states == ["ready", "eager", "eager"]
    assert rig.reasons[1] == "max_graphs allows 1 graphs, and there are smaller ones"
    items = rig.tower.golden_items()
    assert rig.forward.run(items).runner == "eager" and rig.forward.run(items[:1]).runner == "npu"


class Reads(Tower[np.ndarray]):
    """A tower whose forward waits for the device, which a capture must not; all else is the packed tower's."""

    def __init__(self, inner: Tower[np.ndarray]) -> None:
        self.inner, self.spec, self.module = inner, inner.spec, inner.module
        self.collate, self.length_of, self.grid_of = inner.collate, inner.length_of, inner.grid_of  # type: ignore[method-assign]
        self.golden_items, self.describe_preprocessing = inner.golden_items, inner.describe_preprocessing  # type: ignore[method-assign]

    def collate(self, items: Any, *, length: int | None = None) -> dict[str, torch.Tensor]:
        raise NotImplementedError

    def forward(self, inputs: Inputs) -> TowerOutput:
        output = self.inner.forward(inputs)
        return output._replace(vectors=output.vectors * (1.0 if float(output.vectors.sum()) else 2.0))

    def golden_items(self) -> list[np.ndarray]:
        raise NotImplementedError

    def describe_preprocessing(self) -> dict[str, Any]:
        raise NotImplementedError


@pytest.mark.parametrize(("tower", "buckets"), [(demo, PICTURES), (packed, PACKED)])
def test_a_failed_capture_leaves_nothing_behind(tower: Callable[[], Tower[Any]], buckets: list[Bucket]) -> None:
    """torch_npu leaves its capture stream current and, with packed batches, its dispatch mode active."""
    rig = Rig(Reads(tower()), buckets).prepare()
    assert rig.states == ["eager"] * 3 and settled()
    for reason in rig.reasons:  # of what spoilt the capture, not of its end
        assert reason.startswith("capture with attention backend 'ascend_attn' failed: ")
        assert "the capture is invalid" not in reason and "is captured: it cannot be synchronised" in reason
    items = rig.tower.golden_items()
    assert worst_cosine(rig.forward.run(items).vectors, rig.eagerly(items)) >= 0.9999
    after = Rig(tower(), buckets).prepare()
    assert after.states == ["ready"] * 3, after.reasons
    assert worst_cosine(after.forward.run(items).vectors, rig.eagerly(items)) >= 0.9999


class SkipsUpdate(NpuGraphRunner):
    def update(self, captured: Captured, inputs: Inputs) -> None:
        """Nothing is handed over."""


class UpdatesWithOldLengths(NpuGraphRunner):
    """Hands over the boundaries of the capture, again and again."""

    def update(self, captured: Captured, inputs: Inputs) -> None:
        old = {name: torch.tensor(segments.host, dtype=torch.int32) for name, segments in captured.segments.items()}
        super().update(captured, {**inputs, **old})


class FreesBuffers(NpuGraphRunner):
    """Keeps copies in the place of the buffers that the graph reads; those are freed and given to others."""

    def _capture(self, bucket: Bucket, inputs: Inputs) -> Captured:
        kept = super()._capture(bucket, inputs)
        copies = {name: tensor.clone() for name, tensor in kept.inputs.items()}
        return dataclasses.replace(kept, inputs=copies, segments={})


class DropsOutput(NpuGraphRunner):
    """Keeps a copy of the output: the graph's own is free for the next capture in the pool."""

    def _capture(self, bucket: Bucket, inputs: Inputs) -> Captured:
        kept = super()._capture(bucket, inputs)
        output = TowerOutput(
            kept.output.vectors.clone(), None if kept.output.tokens is None else kept.output.tokens.clone()
        )
        return dataclasses.replace(kept, output=output)


class BakesBoundaries(NpuGraphRunner):
    """Says that the boundaries of the capture stay, so that SDPA cuts by them on the host."""

    def capture_segments(self, bucket: Bucket, inputs: Inputs, static: Inputs) -> SegmentsByName:
        found = super().capture_segments(bucket, inputs, static)
        return {name: dataclasses.replace(segments, replayed=False) for name, segments in found.items()}


class ForgetsOneInput(NpuGraphRunner):
    def run(self, bucket: Bucket, inputs: Inputs, *, tokens: bool = False) -> Any:
        captured = self._captured[bucket]
        name = "patches" if "patches" in inputs else next(iter(inputs))
        return super().run(bucket, {**inputs, name: captured.inputs[name].cpu()}, tokens=tokens)


WRONG: list[tuple[type[NpuGraphRunner], str, Callable[[], Tower[Any]], list[Bucket], str]] = [
    (SkipsUpdate, "ascend_attn", packed, PACKED, "replay failed: "),
    (UpdatesWithOldLengths, "ascend_attn", packed, PACKED, "replay differs from eager"),
    (FreesBuffers, "ascend_attn", packed, PACKED, "replay "),  # garbage may be no place to look up
    (FreesBuffers, "ascend_attn", demo, PICTURES, "replay differs from eager"),
    (DropsOutput, "ascend_attn", demo, PICTURES, "replay differs from eager"),
    (BakesBoundaries, "sdpa", packed, PACKED, "replay differs from eager"),
    (ForgetsOneInput, "ascend_attn", packed, PACKED, "replay differs from eager"),
    (ForgetsOneInput, "ascend_attn", demo, PICTURES, "replay differs from eager"),
]


@pytest.mark.parametrize(("kind", "backend", "tower", "buckets", "reason"), WRONG)
def test_graphs_that_are_wrong_are_found_out(
    kind: type[NpuGraphRunner], backend: str, tower: Callable[[], Tower[Any]], buckets: list[Bucket], reason: str
) -> None:
    rig = Rig(tower(), buckets, kind=kind, backend=backend).prepare()
    assert rig.states == ["disabled"] * 3, rig.reasons
    assert all(found.startswith(reason) for found in rig.reasons), rig.reasons
    items = rig.tower.golden_items()
    found = rig.forward.run(items)
    vectors, name = found.vectors, found.runner
    assert name == "eager" and worst_cosine(vectors, rig.eagerly(items)) >= 0.9999


def test_inputs_of_another_size_are_refused() -> None:
    """A copy into the buffers would spread one picture over all of them without a word."""
    rig = Rig(demo(), PICTURES).prepare()
    one = rig.tower.gather(rig.tower.golden_items()[:1])
    with pytest.raises(
        ValueError, match=r"bucket batch=4 was captured with inputs .*\(4, 3, 64, 64\).*\(1, 3, 64, 64\)"
    ):
        rig.runner.run(Bucket(4), one)
    with pytest.raises(ValueError, match="bucket batch=1"):
        rig.runner.run(Bucket(1), {})
    with pytest.raises(ValueError, match=r"captured with inputs .*uint8.*and is given .*float32"):
        rig.runner.run(Bucket(1), rig.tower.finish(one))
