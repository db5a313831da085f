"""A batch crosses to the device while the one before is computed: each gets its own vectors, whoever comes first."""

import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import torch

from encoder.graphs.captured import Captured
from encoder.graphs.runner import Bucket
from encoder.models.tower import Inputs
from tests.graphs.fakes import Pictures, Texts
from tests.graphs.recording import Event, Graph, RecordingDevice
from tests.graphs.test_captured import PACKED, PICTURES, Runner, eagerly, packed, rig
from tests.graphs.test_captured import stand_ins as stand_ins
from tests.support.checkpoints import worst_cosine
from tests.support.packed_tower import pictures

BUCKET = Bucket(2)
GATE = threading.Event()
REPLAYING = threading.Semaphore(0)


class HeldGraph(Graph):
    """A replay begins when the gate is open."""

    def replay(self) -> None:
        REPLAYING.release()
        assert GATE.wait(10)
        super().replay()


class HeldDevice(RecordingDevice):
    CUDAGraph = HeldGraph


class Held(Runner):
    device_type = HeldDevice


@pytest.fixture(autouse=True)
def open_gate() -> Iterator[None]:
    GATE.set()
    yield
    GATE.set()


def items(seed: int, count: int = 2) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).standard_normal((count, 6)).astype(np.float32))


def given(threads: ThreadPoolExecutor, runner: Runner, seed: int) -> "Future[Any]":
    return threads.submit(runner.run, BUCKET, Pictures().collate(items(seed)))


def handed_over(runner: Runner) -> int:
    return len(runner._copies.copies)


def until(condition: Any) -> None:
    for _ in range(1000):
        if condition():
            return
        threading.Event().wait(0.01)
    raise AssertionError("it did not come to pass in ten seconds")


def test_the_next_batch_is_on_its_way_while_one_is_computed() -> None:
    _, runner, eager = rig(Pictures(), PICTURES, kind=Held)
    before = handed_over(runner)
    while REPLAYING.acquire(blocking=False):
        pass
    GATE.clear()
    with ThreadPoolExecutor(3) as threads:
        first = given(threads, runner, 1)
        assert REPLAYING.acquire(timeout=10)
        second = given(threads, runner, 2)
        until(lambda: handed_over(runner) == before + 2)
        third = given(threads, runner, 3)
        assert not REPLAYING.acquire(timeout=0.05), "one replay at a time"
        assert handed_over(runner) == before + 2, "there is room for two"
        GATE.set()
        found = [one.result(10)[0].vectors.numpy() for one in (first, second, third)]
    for seed, vectors in enumerate(found, start=1):
        assert np.abs(vectors - eagerly(eager, items(seed))).max() <= 1e-5


@pytest.mark.parametrize("make", [Pictures, Texts])
def test_two_threads_get_their_own_vectors(make: Any) -> None:
    tower = make()
    buckets = PICTURES if make is Pictures else [Bucket(batch, 16) for batch in (1, 2, 4)]
    forward, _, eager = rig(tower, buckets)
    golden = tower.golden_items()
    asked = [golden[start : start + count] for count in (2, 1, 4, 3, 2) for start in range(5 - count)] * 8
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(forward.run, asked))
    assert {answer.runner for answer in answers} == {"cuda"}
    for one, answer in zip(asked, answers, strict=True):
        assert np.abs(answer.vectors - eagerly(eager, one)).max() <= 1e-5


def test_two_threads_with_packed_batches() -> None:
    forward, _, eager = rig(packed(), PACKED)
    asked = [pictures(lengths, seed=seed) for seed in range(8) for lengths in ([3, 4], [16, 16, 16], [7, 9], [16])]
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(forward.run, asked))
    for one, answer in zip(asked, answers, strict=True):
        assert answer.runner == "cuda" and worst_cosine(answer.vectors, eagerly(eager, one)) >= 0.9999


class Hasty(Runner):
    """Replays without waiting for the batch to arrive."""

    def _hand_over(self, place: Any, inputs: Inputs) -> Event:
        return Event(super()._hand_over(place, inputs).stream, 0)


def test_a_replay_that_does_not_wait_for_its_batch_is_found_out() -> None:
    forward, _, _ = rig(Pictures(), PICTURES, kind=Hasty)
    assert {record.state for record in forward.records} == {"disabled"}


class FailsToUpdate(Runner):
    """As `update()` may on an NPU."""

    def update(self, captured: Captured, inputs: Inputs) -> None:
        if bool((inputs["pixels"] == 0).all()):
            raise RuntimeError("these lengths cannot be")


def test_a_failed_replay_leaves_room_for_the_next() -> None:
    _, runner, eager = rig(Pictures(), PICTURES, kind=FailsToUpdate)
    for seed in range(4):
        with pytest.raises(RuntimeError, match="these lengths cannot be"):
            runner.run(BUCKET, {"pixels": torch.zeros(2, 6)})
        vectors = runner.run(BUCKET, Pictures().collate(items(seed)))[0].vectors.numpy()
        assert np.abs(vectors - eagerly(eager, items(seed))).max() <= 1e-5


def test_who_takes_batches_ahead_says_so() -> None:
    forward, runner, eager = rig(Pictures(), PICTURES)
    assert runner.takes_ahead and forward.takes_ahead and not eager.takes_ahead
