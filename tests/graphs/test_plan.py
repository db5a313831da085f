"""What goes to the device together: least time in all, by the measured times; held against trying every way."""

import random
from collections.abc import Sequence
from itertools import pairwise

import pytest

from encoder.graphs.plan import BatchPlan
from encoder.graphs.runner import Bucket, GraphRecord


def record(bucket: Bucket, replay_ms: float, **known: object) -> GraphRecord:
    return GraphRecord("openvino", bucket, "sdpa", "float32", replay_ms=replay_ms, eager_ms=replay_ms * 2, **known)  # type: ignore[arg-type]


def plan_of(times: dict[int, float]) -> BatchPlan:
    return BatchPlan([record(Bucket(batch), milliseconds) for batch, milliseconds in times.items()])


CPU = {1: 22.0, 2: 44.0, 4: 88.0, 8: 176.0}  # an item costs what an item costs
GPU = {1: 2.0, 2: 2.1, 4: 2.2, 8: 2.4}  # a launch costs what a launch costs


@pytest.mark.parametrize(
    ("times", "waiting", "taken"),
    [
        (CPU, 1, 1),
        (CPU, 3, 2),
        (CPU, 4, 4),
        (CPU, 5, 4),
        (CPU, 7, 4),
        (CPU, 8, 8),
        (GPU, 1, 1),
        (GPU, 3, 3),
        (GPU, 5, 5),
        (GPU, 7, 7),
        (GPU, 8, 8),
    ],
)
def test_a_cpu_fills_buckets_and_a_gpu_fills_the_device(times: dict[int, float], waiting: int, taken: int) -> None:
    assert len(plan_of(times).choose([0] * waiting)) == taken


def test_texts_go_with_their_like_where_padding_costs() -> None:
    lengths = (16, 77)
    costly = BatchPlan([record(Bucket(batch, length), batch * length) for batch in (1, 2, 4) for length in lengths])
    assert costly.choose([12, 70, 9, 77]) == [0, 2] and costly.choose([70, 12, 77, 9]) == [0, 2]
    cheap = BatchPlan([record(Bucket(batch, length), 2.0) for batch in (1, 2, 4) for length in lengths])
    assert cheap.choose([12, 70, 9, 77]) == [0, 1, 2, 3]


def test_what_a_bucket_really_does_counts() -> None:
    """A disabled bucket runs eager, which here takes twice as long; one that cannot run is no choice at all."""
    slow = BatchPlan([record(Bucket(1), 10.0), record(Bucket(4), 12.0, state="disabled"), record(Bucket(2), 12.0)])
    assert slow.choose([0, 0]) == [0, 1] and slow.choose([0, 0, 0]) == [0, 1]  # 12 and 10, or 24
    assert len(BatchPlan([record(Bucket(1), 10.0), record(Bucket(4), 11.0, serves=False)]).choose([0] * 1)) == 1
    unmeasured = BatchPlan([record(Bucket(1), 0.0), record(Bucket(4), 0.0)])
    assert 0 in unmeasured.choose([0, 0, 0])


@pytest.mark.parametrize("disturbed", [8, 16, 32])
def test_a_bucket_that_was_disturbed_at_start_is_filled_all_the_same(disturbed: int) -> None:
    """Times as a start in a fleet measured them: twice four pictures would be quicker than eight."""
    true = {1: 15.5, 2: 23.9, 4: 35.8, 8: 60.0, 16: 92.0, 32: 165.0}
    plan = plan_of(true | {disturbed: true[disturbed] * 2.5})
    assert [len(plan.choose([0] * waiting)) for waiting in (4, 8, 16, 32)] == [4, 8, 16, 32]
    # What does not fill one is still split where that saves computing for nothing: 4 and 1, 16 and 4.
    assert len(plan.choose([0] * 5)) == 4 and len(plan.choose([0] * 20)) == 16


def test_smaller_buckets_in_the_place_of_a_larger_one_may_be_filled_in_part() -> None:
    assert len(plan_of({3: 10.0, 8: 100.0}).choose([0] * 8)) == 8  # three of three, one with a place free, take 30
    assert len(plan_of({3: 10.0, 8: 100.0}).choose([0] * 6)) == 3


def test_a_bucket_of_texts_is_held_against_smaller_ones_of_its_length() -> None:
    """Eight long ones take as long as they take, whatever eight short ones do."""
    times = {(4, 16): 4.0, (8, 16): 30.0, (4, 77): 16.0, (8, 77): 30.0}
    plan = BatchPlan([record(Bucket(*size), milliseconds) for size, milliseconds in times.items()])
    assert len(plan.choose([10] * 8)) == 8 and len(plan.choose([70] * 8)) == 8
    assert plan.choose([10] * 4 + [70] * 4) == [0, 1, 2, 3]  # 4 and 16, not 30


def test_what_runs_eager_is_no_disturbance() -> None:
    """Four by eager take 40, and do so each time; two and two take 24."""
    times = [record(Bucket(2), 12.0), record(Bucket(4), 20.0, state="disabled")]
    assert len(BatchPlan(times).choose([0] * 4)) == 2
    others_eager = [record(Bucket(2), 12.0, state="disabled"), record(Bucket(4), 60.0)]
    assert len(BatchPlan(others_eager).choose([0] * 4)) == 2


def test_packed_batches_are_taken_as_they_come() -> None:
    packed = BatchPlan([record(Bucket(4, tokens=64, segments=8, max_length=16), 5.0)])
    assert packed.choose([3, 16, 9]) == [0, 1, 2] and BatchPlan([]).choose([1, 2]) == [0, 1]


def every_split(items: Sequence[int]) -> list[list[list[int]]]:
    """All ways to part a list in groups."""
    if not items:
        return [[]]
    first, rest = items[0], every_split(items[1:])
    return [[[first], *groups] for groups in rest] + [
        [*groups[:place], [first, *groups[place]], *groups[place + 1 :]]
        for groups in rest
        for place in range(len(groups))
    ]


@pytest.mark.parametrize("seed", range(30))
def test_no_other_way_is_quicker(seed: int) -> None:
    """Random times that rise with batch and length; every way to group up to six texts."""
    rng = random.Random(seed)
    batches, lengths = (1, 2, 4), (8, 16, 32)
    batch_ms = {1: 1.0, 2: 1.0 + rng.random()}
    batch_ms[4] = batch_ms[2] * (1.0 + rng.random())  # never more than two of half the size
    length_ms = {8: 1.0, 16: 1.0 + rng.random(), 32: 2.0 + 2 * rng.random()}
    times = {(batch, length): batch_ms[batch] * length_ms[length] for batch in batches for length in lengths}
    plan = BatchPlan([record(Bucket(*size), milliseconds) for size, milliseconds in times.items()])

    def cost(groups: list[list[int]]) -> float:
        total = 0.0
        for group in groups:
            batch = next((size for size in batches if size >= len(group)), None)
            if batch is None:
                return float("inf")
            total += times[batch, next(length for length in lengths if length >= max(group))]
        return total

    waiting = [rng.randint(1, 32) for _ in range(rng.randint(2, 4))]
    best = min(cost(groups) for groups in every_split(waiting))
    left, spent = list(waiting), 0.0
    while left:
        places = plan.choose(left)
        assert 0 in places and all(a < b for a, b in pairwise(places))
        spent += cost([[left[place] for place in places]])
        left = [length for place, length in enumerate(left) if place not in places]
    assert spent == pytest.approx(best)
