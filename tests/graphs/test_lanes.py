"""Lanes of a device: which buckets there are, which one a batch goes through, and what is known of them."""

from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier
from threading import enumerate as enumerate_threads
from time import sleep

import numpy as np
import pytest
import torch

from encoder.attention.dispatch import CallTrace
from encoder.errors import Unsupported
from encoder.graphs.eager import EagerRunner
from encoder.graphs.lanes import check_lanes, with_lanes
from encoder.graphs.openvino import OpenVinoRunner
from encoder.graphs.plan import BatchPlan
from encoder.graphs.runner import Bucket, GraphRecord
from encoder.models.tower import Inputs, TowerOutput
from tests.graphs.fakes import Pictures, Recorded, Texts
from tests.graphs.forwards import expected_pictures, expected_texts, forward_of, pictures_of, states, watched

LANES = with_lanes([Bucket(1), Bucket(4), Bucket(8)], 2)


@pytest.mark.parametrize(
    ("sizes", "lanes", "whole", "shared"),
    [
        ((1, 2, 4, 8, 16, 32), 2, [1], [1, 2, 4, 8, 16]),
        ((1, 8, 32), 2, [1], [1, 4, 16]),
        ((8,), 2, [8], [4]),
        ((1,), 2, [1], [1]),
        ((1, 5), 3, [1], [1, 2]),
        ((1, 4), 1, [1, 4], []),
    ],
)
def test_each_size_is_shared_out_among_the_lanes(
    sizes: tuple[int, ...], lanes: int, whole: list[int], shared: list[int]
) -> None:
    buckets = with_lanes([Bucket(size) for size in sizes], lanes)
    assert [bucket.batch for bucket in buckets if bucket.lanes == 1] == whole
    assert [bucket.batch for bucket in buckets if bucket.lanes == lanes > 1] == shared
    assert len(buckets) == len(set(buckets)) == len(whole) + len(shared)


def test_every_length_has_its_lone_text_and_its_shares() -> None:
    buckets = with_lanes([Bucket(batch, length) for batch in (1, 4) for length in (8, 16)], 2)
    assert {bucket for bucket in buckets if bucket.lanes == 1} == {Bucket(1, 8), Bucket(1, 16)}
    assert {(bucket.batch, bucket.length) for bucket in buckets if bucket.lanes == 2} == {
        (1, 8), (1, 16), (2, 8), (2, 16),
    }  # fmt: skip


def test_lanes_need_a_runner_that_has_them_and_threads_of_their_own() -> None:
    check_lanes(OpenVinoRunner, 2, 2, packed=False)
    check_lanes(EagerRunner, 1, 1, packed=True)
    with pytest.raises(Unsupported, match="this model packs pictures of any"):
        check_lanes(OpenVinoRunner, 2, 2, packed=True)
    with pytest.raises(Unsupported, match="lanes are for OpenVINO, and this engine runs with eager"):
        check_lanes(EagerRunner, 2, 8, packed=False)
    with pytest.raises(Unsupported, match="3 lanes cannot share 2 threads"):
        check_lanes(OpenVinoRunner, 3, 2, packed=False)


@pytest.mark.parametrize(
    ("count", "alone", "taken"),
    [
        (1, True, {"batch=1": 1}),
        (1, False, {"batch=1,lanes=2": 1}),
        (2, True, {"batch=1,lanes=2": 2}),
        (2, False, {"batch=2,lanes=2": 1}),
        (8, True, {"batch=4,lanes=2": 2}),
        (8, False, {"batch=4,lanes=2": 2}),
        (7, True, {"batch=4,lanes=2": 2}),  # four and three
        (20, True, {"batch=4,lanes=2": 4, "batch=2,lanes=2": 2}),  # ten in each: 4, 4, 2
    ],
)
def test_a_lone_item_goes_through_the_whole_device_and_others_through_lanes(
    count: int, alone: bool, taken: dict[str, int]
) -> None:
    tower = Pictures()
    forward, runner = watched(tower, LANES)
    items = pictures_of(count)
    vectors = forward.run(items, alone=alone).vectors
    assert Counter(str(bucket) for bucket, _ in runner.given) == taken
    assert np.abs(vectors - expected_pictures(tower, items)).max() <= 1e-5
    assert forward.counters == {"graph_replay": sum(taken.values())}


def test_what_the_whole_device_takes_is_no_size_of_a_lane() -> None:
    """The one bucket there is, of eight, becomes four for each of two lanes."""
    tower = Pictures()
    forward, runner = watched(tower, with_lanes([Bucket(8)], 2))
    items = pictures_of(8)
    found = forward.run(items, alone=False)
    assert forward.largest == 4 and Counter(str(bucket) for bucket, _ in runner.given) == {"batch=4,lanes=2": 2}
    assert np.abs(found.vectors - expected_pictures(tower, items)).max() <= 1e-5


def test_no_lane_is_left_out_of_the_counters() -> None:
    class Slow(Counter[str]):
        def __setitem__(self, name: str, count: int) -> None:
            sleep(0.005)  # here the other lane reads what this one has not written yet
            super().__setitem__(name, count)

    forward = forward_of(Pictures(), LANES)
    forward._counters = Slow()
    with ThreadPoolExecutor(2) as lanes:
        list(lanes.map(lambda seed: forward.run(pictures_of(1, seed), alone=False), range(10)))
    assert forward.counters == {"graph_replay": 10}


def test_a_batch_that_is_alone_runs_side_by_side() -> None:
    """Each half waits for the other to be under way."""
    both = Barrier(2, timeout=20)

    class Meets(Recorded):
        meets = False

        def copy_in(self, bucket: Bucket, inputs: Inputs) -> None:
            if self.meets:
                both.wait()
            super().copy_in(bucket, inputs)

    tower = Pictures()
    forward = forward_of(tower, with_lanes([Bucket(1), Bucket(4)], 2), Meets)
    Meets.meets = True
    items = pictures_of(3)  # two and one, in buckets of their own
    found = forward.run(items, tokens=True)
    assert np.abs(found.vectors - expected_pictures(tower, items)).max() <= 1e-5
    assert len(found.tokens) == 3 and found.runner == "recorded"


def test_both_halves_name_their_runner() -> None:
    class RightAtFour(Recorded):
        def hand_out(self, bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
            return buffer.clone() if bucket.batch == 4 else buffer.flip(-1)

    tower = Pictures()
    forward = forward_of(tower, LANES, RightAtFour)
    items = pictures_of(3)  # two in the bucket of four, and one for which that is too large
    found = forward.run(items)
    assert found.runner == "eager+recorded" and forward.counters == {"graph_replay": 1, "eager_run": 1}
    assert np.abs(found.vectors - expected_pictures(tower, items)).max() <= 1e-5


def test_release_ends_the_threads_of_the_lanes() -> None:
    before = set(enumerate_threads())
    forward = forward_of(Pictures(), LANES)
    forward.run(pictures_of(4))
    mine = set(enumerate_threads()) - before
    forward.release()
    assert mine and not any(thread.is_alive() for thread in mine)


def test_texts_of_both_halves_come_back_in_order() -> None:
    tower = Texts()
    forward, _ = watched(tower, with_lanes([Bucket(batch, length) for batch in (1, 8) for length in (4, 8, 16)], 2))
    items = [list(range(5, 5 + length)) for length in (3, 12, 5, 16, 4, 7, 9)]
    assert np.abs(forward.run(items).vectors - expected_texts(tower, items)).max() <= 1e-5


class WrongInLanes(Recorded):
    def hand_out(self, bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.flip(-1) if bucket.lanes == 2 else buffer.clone()


def test_a_lane_whose_graph_is_wrong_is_found_out_and_its_size_runs_eager() -> None:
    tower = Pictures()
    forward = forward_of(tower, LANES, WrongInLanes)
    assert states(forward) == {
        "batch=1": "ready", "batch=1,lanes=2": "disabled", "batch=2,lanes=2": "disabled", "batch=4,lanes=2": "disabled",
    }  # fmt: skip
    items = pictures_of(6)
    found = forward.run(items)
    assert found.runner == "eager" and np.abs(found.vectors - expected_pictures(tower, items)).max() <= 1e-5


def test_lanes_take_turns_at_eager() -> None:
    """Its dispatcher, and the model's attention, know of one eager forward at a time."""

    class OneAtATime(EagerRunner):
        busy = False

        def run(self, bucket: Bucket, inputs: Inputs, *, tokens: bool = False) -> tuple[TowerOutput, CallTrace]:
            assert not self.busy
            self.busy = True
            sleep(0.05)
            self.busy = False
            return super().run(bucket, inputs, tokens=tokens)

    tower = Pictures()
    forward = forward_of(tower, LANES, WrongInLanes, OneAtATime)
    items = pictures_of(6)
    with ThreadPoolExecutor(2) as lanes:
        found = list(lanes.map(lambda part: forward.run(part, alone=False), (items[:2], items[2:])))
    vectors = np.concatenate([one.vectors for one in found])
    assert [one.runner for one in found] == ["eager"] * 2 and forward.counters == {"eager_run": 2}
    assert np.abs(vectors - expected_pictures(tower, items)).max() <= 1e-5


def record(bucket: Bucket, replay_ms: float) -> GraphRecord:
    return GraphRecord("openvino", bucket, "sdpa", "float32", replay_ms=replay_ms, eager_ms=replay_ms)


def test_what_a_replay_takes_of_the_device_is_shared_by_the_lanes() -> None:
    assert record(Bucket(4, lanes=2), 80.0).device_ms == 40.0 and record(Bucket(4), 80.0).device_ms == 80.0


def test_the_plan_is_made_of_what_a_lane_takes() -> None:
    """The whole device's bucket of one is quick, and no choice for what goes through a lane."""
    plan = BatchPlan([record(Bucket(1), 1.0), record(Bucket(1, lanes=2), 40.0), record(Bucket(2, lanes=2), 42.0)])
    assert plan.choose([0, 0]) == [0, 1]
