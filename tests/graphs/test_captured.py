"""The CUDA runner on a device that records and replays operators: what a GPU would be asked, checked without one."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from encoder.attention.dispatch import Dispatcher, SegmentsByName
from encoder.attention.registry import backend_class
from encoder.attention.resolve import ResolvedBackend
from encoder.graphs import proof
from encoder.graphs.bucketed import BucketedForward
from encoder.graphs.captured import Captured, CapturingRunner
from encoder.graphs.cuda import CudaGraphRunner
from encoder.graphs.eager import EagerRunner
from encoder.graphs.packing import packed_buckets
from encoder.graphs.runner import Bucket
from encoder.models.tower import Inputs, Tower, TowerOutput
from tests.attention import kernels
from tests.graphs.fakes import CPU, Pictures, Texts
from tests.graphs.recording import RecordingDevice
from tests.support.checkpoints import worst_cosine
from tests.support.packed_tower import PackedTower, alone, pictures, sharp_vit

PACKED = packed_buckets(16, [1, 3])[1:]
PICTURES = [Bucket(1), Bucket(2), Bucket(4)]
LONGEST: list[int] = []


@torch.library.custom_op("vitfleet_tests::varlen", mutates_args=())
def _varlen(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, cu_seqlens: torch.Tensor, longest: int, scale: float
) -> torch.Tensor:
    LONGEST.append(longest)
    return kernels.packed_attention(query, key, value, cu_seqlens, longest, scale, None, None)


def varlen(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_seq_q: torch.Tensor,
    cu_seq_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
) -> torch.Tensor:
    """torch's varlen attention as one operator, as a graph sees it."""
    assert cu_seq_k is cu_seq_q and max_k == max_q and window_size == (-1, -1) and not enable_gqa
    return _varlen(query, key, value, cu_seq_q, max_q, scale)


@pytest.fixture(autouse=True)
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "SLOWER_THAN_EAGER", 1e9)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    LONGEST.clear()


class Runner(CudaGraphRunner):
    """The CUDA runner, its device another one."""

    device_type = RecordingDevice

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.recording = self.device_type()

    @property
    def accelerator(self) -> Any:
        return self.recording

    def staging_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Without a device nothing can be pinned."""
        return CapturingRunner.staging_buffer(self, tensor)


def rig(
    tower: Tower[Any], buckets: Sequence[Bucket], backend: str = "varlen", kind: type[Runner] = Runner
) -> tuple[BucketedForward, Runner, EagerRunner]:
    dtype = torch.bfloat16 if isinstance(tower, PackedTower) else torch.float32
    if isinstance(tower, PackedTower):
        tower.module.to(dtype)
    decided = ResolvedBackend(backend, "server", "a test", backend_class(backend).capabilities)
    dispatcher = Dispatcher(decided)
    runner, eager = kind(tower, dispatcher, CPU, dtype), EagerRunner(tower, dispatcher, CPU, dtype)
    forward = BucketedForward(runner, eager, buckets)
    forward.prepare(tower.golden_items(), lambda message: None)
    return forward, runner, eager


def packed() -> PackedTower:
    return PackedTower(sharp_vit(8, 16), 8, 16)


def eagerly(eager: EagerRunner, items: Sequence[Any]) -> np.ndarray:
    return eager.run(Bucket(len(items)), eager.tower.collate(items))[0].vectors.numpy()


@pytest.mark.parametrize("backend", ["varlen", "sdpa"])
def test_packed_graphs_follow_their_boundaries(backend: str) -> None:
    forward, _, eager = rig(packed(), PACKED, backend)
    assert [(record.state, record.reason) for record in forward.records] == [("ready", "")] * 3
    module = sharp_vit(8, 16)
    for lengths in ([3, 4], [16, 16, 16], [4, 3], [7, 9], [9, 7], [16], [1], [16, 5, 9]):
        items = pictures(lengths, seed=sum(lengths))
        found = forward.run(items)
        vectors, name = found.vectors, found.runner
        assert name == "cuda" and worst_cosine(vectors, eagerly(eager, items)) >= 0.9999
        assert worst_cosine(vectors, np.stack([alone(module, item) for item in items])) >= 0.999


def test_the_longest_segment_is_the_buckets() -> None:
    """It is baked into the graph, so it must stand for every batch that fits."""
    forward, _, _ = rig(packed(), PACKED)
    for lengths, longest in (([3, 4], 8), ([2, 14], 16), ([16, 16, 1], 16)):
        LONGEST.clear()
        forward.run(pictures(lengths, seed=1))
        assert [longest] * 3 == LONGEST


@pytest.mark.parametrize("make", [Pictures, Texts])
def test_fixed_sizes(make: type[Tower[Any]]) -> None:
    tower = make()
    buckets = PICTURES if make is Pictures else [Bucket(batch, length) for batch in (1, 2, 4) for length in (8, 16)]
    forward, _, eager = rig(tower, buckets)
    assert {record.state for record in forward.records} == {"ready"}
    items = tower.golden_items()
    for count in (1, 4, 2, 3, 1):
        found = forward.run(items[-count:])
        vectors, name = found.vectors, found.runner
        assert name == "cuda" and np.abs(vectors - eagerly(eager, items[-count:])).max() <= 1e-5


def test_vectors_belong_to_the_caller() -> None:
    forward, _, eager = rig(Pictures(), PICTURES)
    items = Pictures().golden_items()
    first = forward._runner.run(Bucket(2), Pictures().collate(items[:2]), tokens=True)[0]
    forward._runner.run(Bucket(2), Pictures().collate(items[2:]), tokens=True)
    assert np.abs(first.vectors.numpy() - eagerly(eager, items[:2])).max() <= 1e-5
    features = eager.run(Bucket(2), Pictures().collate(items[:2]), tokens=True)[0].tokens
    assert first.tokens is not None and torch.equal(first.tokens, features)


class FreesBuffers(Runner):
    """Keeps copies in the place of the buffers that the graph reads."""

    def _capture(self, bucket: Bucket, inputs: Inputs) -> Captured:
        kept = super()._capture(bucket, inputs)
        copies = {name: tensor.clone() for name, tensor in kept.inputs.items()}
        return dataclasses.replace(kept, inputs=copies)


class MaxLengthOfTheCapture(Runner):
    """The kernel is told the longest item of the capture."""

    def capture_segments(self, bucket: Bucket, inputs: Inputs, static: Inputs) -> SegmentsByName:
        found = super().capture_segments(bucket, inputs, static)
        return {
            name: dataclasses.replace(segments, max_length=int(inputs[name].diff().min()) or 1)
            for name, segments in found.items()
        }


class BoundariesOnTheHost(Runner):
    """SDPA would cut by the boundaries of the capture."""

    def capture_segments(self, bucket: Bucket, inputs: Inputs, static: Inputs) -> SegmentsByName:
        found = super().capture_segments(bucket, inputs, static)
        return {
            name: dataclasses.replace(segments, host=tuple(inputs[name].tolist())) for name, segments in found.items()
        }


@pytest.mark.parametrize(
    ("kind", "tower", "buckets", "backend", "state", "reason"),
    [
        (FreesBuffers, packed, PACKED, "varlen", "disabled", "replay differs from eager"),
        (FreesBuffers, Pictures, PICTURES, "varlen", "disabled", "replay differs from eager"),
        (
            MaxLengthOfTheCapture,
            packed,
            PACKED,
            "varlen",
            "eager",
            "capture with attention backend 'varlen' failed: a seg",
        ),
        (BoundariesOnTheHost, packed, PACKED, "sdpa", "disabled", "replay differs from eager"),
    ],
)
def test_graphs_that_are_wrong_are_found_out(
    kind: type[Runner], tower: Any, buckets: list[Bucket], backend: str, state: str, reason: str
) -> None:
    forward, _, eager = rig(tower(), buckets, backend, kind)
    assert {record.state for record in forward.records} == {state}
    assert all(record.reason.startswith(reason) for record in forward.records)
    items = eager.tower.golden_items()
    assert worst_cosine(forward.run(items).vectors, eagerly(eager, items)) >= 0.9999


class Waits(Pictures):
    """Its forward waits for the device."""

    def forward(self, inputs: Inputs) -> TowerOutput:
        output = super().forward(inputs)
        return output._replace(vectors=output.vectors * (1.0 if float(output.vectors.sum()) else 2.0))


def test_after_a_failed_capture_the_stream_is_the_callers_and_the_reason_is_the_first_error() -> None:
    forward, runner, eager = rig(Waits(), PICTURES)
    why = "capture with attention backend 'varlen' failed: CUDA error: operation not permitted when stream is capturing"
    assert [(record.state, record.reason) for record in forward.records] == [("eager", why)] * 3
    assert runner.recording.current is runner.recording.default
    items = Pictures().golden_items()
    assert np.abs(forward.run(items).vectors - eagerly(eager, items)).max() <= 1e-5


class LazyStart(Pictures):
    """Its first forward of a shape waits for the device, as a library does that sets itself up."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[tuple[int, ...]] = set()

    def forward(self, inputs: Inputs) -> TowerOutput:
        output = super().forward(inputs)
        if tuple(output.vectors.shape) not in self.known:
            self.known.add(tuple(output.vectors.shape))
            float(output.vectors.sum())
        return output


def test_what_is_set_up_by_the_first_call_is_not_captured() -> None:
    forward, _, _ = rig(LazyStart(), PICTURES)
    assert [(record.state, record.reason) for record in forward.records] == [("ready", "")] * 3


class FailsOnce(Runner):
    """The second capture runs out of memory."""

    count = 0

    def capturing(self, graph: Any, pool: Any, stream: Any, segments: SegmentsByName) -> Any:
        self.count += 1
        if self.count == 2:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        return super().capturing(graph, pool, stream, segments)


def test_graphs_share_a_pool_which_a_failed_capture_ends() -> None:
    forward, runner, _ = rig(Pictures(), PICTURES)
    assert len(runner.recording.pools) == 1 and len(runner.recording.used_pools) == 3
    forward, runner, _ = rig(Pictures(), PICTURES, kind=FailsOnce)
    assert [record.state for record in forward.records] == ["ready", "eager", "ready"]
    assert len(runner.recording.pools) == 2
    assert "CUDA out of memory" in forward.records[1].reason


def test_what_a_graph_holds_is_told_and_given_back() -> None:
    forward, runner, _ = rig(Pictures(), PICTURES)
    assert [record.memory_bytes for record in forward.records] == [1 << 20] * 3
    forward.release()
    assert not runner._captured
    runner.capture(Bucket(1), Pictures().collate(Pictures().golden_items()[:1]))
    assert len(runner.recording.pools) == 2  # a pool that lost its graphs cannot be used again


@pytest.mark.parametrize(
    "wrong", [{}, {"pixels": torch.zeros(1, 6)}, {"pixels": torch.zeros(4, 6), "more": torch.ones(1)}]
)
def test_inputs_that_are_not_the_buckets_are_refused(wrong: dict[str, torch.Tensor]) -> None:
    _, runner, _ = rig(Pictures(), PICTURES)
    with pytest.raises(ValueError, match="bucket batch=4 was captured with inputs"):
        runner.run(Bucket(4), wrong)


def test_a_replay_counts_the_calls_of_its_capture() -> None:
    forward, runner, _ = rig(packed(), PACKED)
    before = runner.dispatcher.counters()["fused"]
    assert forward.run(pictures([3], seed=0)).trace.fused == 3
    assert runner.dispatcher.counters()["fused"] == before + 3
