"""Wrong graphs are found out, eager then serves, and the reason is told."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from encoder.errors import Unsupported
from encoder.graphs import proof
from encoder.graphs.bucketed import BucketedForward
from encoder.graphs.eager import EagerRunner
from encoder.graphs.runner import Bucket, GraphLimits
from encoder.models.tower import Inputs, Tower, TowerOutput
from tests.graphs import fakes
from tests.graphs.fakes import Pictures, Recorded, SmallEager, Texts, packed_tower, runners
from tests.graphs.forwards import (
    PACKED,
    PICTURES,
    TEXTS,
    expected_pictures,
    forward_of,
    pictures_of,
    reasons,
    states,
    watched,
)
from tests.support.packed_tower import alone, pictures

TOWERS: dict[str, tuple[Callable[[], Tower[Any]], list[Bucket]]] = {
    "pictures": (Pictures, PICTURES),
    "texts": (Texts, TEXTS),
    "packed": (packed_tower, PACKED),
}


@pytest.mark.parametrize("name", TOWERS)
def test_a_right_runner_keeps_every_bucket(name: str) -> None:
    make, buckets = TOWERS[name]
    forward = forward_of(make(), buckets)
    proved = forward.records[1:] if name == "packed" else forward.records  # one golden item is too few for a proof
    assert {(record.state, record.reason) for record in proved} == {("ready", "")}
    assert all(record.replay_ms > 0 and record.eager_ms > 0 and record.memory_bytes == 1 << 20 for record in proved)
    assert forward.items_per_second() > 0


# Which buckets each fault must not survive in: a graph of one bucket alone has no larger one to be spoilt by.
FAULTS: list[tuple[type[Recorded], str, str, int]] = [
    (fakes.IgnoresInputs, "pictures", "replay differs from eager: cosine", 3),
    (fakes.IgnoresInputs, "packed", "replay differs from eager: cosine", 3),
    (fakes.ForgetsOneInput, "texts", "replay differs from eager: cosine", 6),
    (fakes.ForgetsOneInput, "packed", "replay differs from eager: cosine", 3),
    (fakes.SeesNoMask, "texts", "replay differs from eager: cosine", 6),
    (fakes.LetsItemsSeeEachOther, "pictures", "replay differs from eager: cosine", 2),
    (fakes.WrongTheSecondTime, "pictures", "replay differs from eager: cosine", 3),
    (fakes.WrongTheSecondTime, "packed", "replay differs from eager: cosine", 3),
    (fakes.LosesItsWorkSpace, "pictures", "replay differs from eager: cosine", 2),
    (fakes.LosesItsWorkSpace, "packed", "replay differs from eager: cosine", 2),
    (fakes.HandsOutItsBuffer, "pictures", "a later replay changed vectors that were given away", 3),
    (fakes.HandsOutItsBuffer, "packed", "a later replay changed vectors that were given away", 3),
    (fakes.HandsOutItsVectors, "pictures", "a later replay changed vectors that were given away: cosine", 3),
    (fakes.HandsOutItsVectors, "packed", "a later replay changed vectors that were given away: cosine", 3),
    (fakes.HandsOutItsFeatures, "pictures", "a later replay changed vectors that were given away: features: ", 3),
    (fakes.HandsOutItsFeatures, "packed", "a later replay changed vectors that were given away: features: ", 3),
    (fakes.WrongFeatures, "pictures", "replay differs from eager: features: cosine", 3),
    (fakes.WrongFeatures, "packed", "replay differs from eager: features: cosine", 3),
    (fakes.GivesNoFeatures, "pictures", "replay differs from eager: features of 0 items, not of ", 3),
    (fakes.RoundsOneComponent, "pictures", "replay differs from eager: cosine 1.000000, max error ", 3),
    (fakes.ShiftsRows, "pictures", "replay differs from eager: cosine", 2),
    (fakes.GivesNan, "pictures", "replay differs from eager: cosine nan", 3),
    (fakes.FailsAtReplay, "pictures", "replay failed: update() must come before each replay", 3),
]


@pytest.mark.parametrize(("kind", "name", "reason", "least"), FAULTS)
def test_a_wrong_runner_is_found_out_and_eager_serves(kind: type[Recorded], name: str, reason: str, least: int) -> None:
    make, buckets = TOWERS[name]
    tower = make()
    forward = forward_of(tower, buckets, kind)
    disabled = [record for record in forward.records if record.state == "disabled"]
    assert len(disabled) >= least and all(record.reason.startswith(reason) for record in disabled)
    assert "\n" not in "".join(reasons(forward))
    items = tower.golden_items()[:3]
    if not any(record.state == "ready" for record in forward.records):
        found = forward.run(items)
        vectors, runner = found.vectors, found.runner
        assert runner == "eager" and forward.counters == {"eager_run": 1}
        eager = forward_of(tower, buckets, EagerRunner).run(items).vectors
        assert np.array_equal(vectors, eager)


def test_what_is_disabled_is_released_once_and_run_no_more() -> None:
    runner, eager = runners(Pictures(), fakes.WrongTheSecondTime)
    assert isinstance(runner, Recorded)
    forward = BucketedForward(runner, eager, PICTURES)
    forward.prepare(Pictures().golden_items(), lambda message: None)
    assert sorted(runner.released) == PICTURES and not runner.static
    ran = dict(runner.runs)
    forward.run(pictures_of(2))
    assert dict(runner.runs) == ran


def test_the_largest_is_captured_first_and_replays_go_up_and_down() -> None:
    _, runner = watched(Pictures(), PICTURES)
    assert runner.captured == [Bucket(4), Bucket(2), Bucket(1)]
    order: list[int] = []

    class Order(Recorded):
        def copy_in(self, bucket: Bucket, inputs: Inputs) -> None:
            order.append(bucket.batch)
            super().copy_in(bucket, inputs)

    forward_of(Pictures(), PICTURES, Order)
    assert order[:6] == [1, 2, 4, 4, 2, 1]


def test_packed_replays_see_other_boundaries_of_as_many_tokens() -> None:
    seen: dict[Bucket, list[list[int]]] = {}

    class Boundaries(Recorded):
        def capture(self, bucket: Bucket, inputs: Inputs) -> int:
            seen[bucket] = [inputs["cu_seqlens"].tolist()]
            return super().capture(bucket, inputs)

        def copy_in(self, bucket: Bucket, inputs: Inputs) -> None:
            seen[bucket].append(inputs["cu_seqlens"].tolist())
            super().copy_in(bucket, inputs)

    forward_of(packed_tower(), PACKED, Boundaries)
    for bucket in PACKED[2:]:  # the smallest have room for one golden item alone
        captured, first, second = seen[bucket]
        assert captured != first != second and captured[-1] == first[-1] == second[-1] == bucket.tokens
    largest = seen[PACKED[-1]]
    assert sorted(np.diff(largest[1])) == sorted(np.diff(largest[2]))


def test_a_capture_that_fails_leaves_its_bucket_eager_and_says_why() -> None:
    tower = Pictures()
    forward = forward_of(tower, PICTURES, fakes.FailsAtCapture)
    assert states(forward) == {"batch=1": "ready", "batch=2": "ready", "batch=4": "eager"}
    why = "capture with attention backend 'sdpa' failed: NPU out of memory. Tried to allocate 2 GiB"
    assert forward.records[-1].reason == why and forward.records[-1].backend == "sdpa"
    assert forward.records[-1].eager_ms > 0 and forward.records[-1].replay_ms == 0
    items = pictures_of(3)
    found = forward.run(items)
    vectors, name = found.vectors, found.runner
    assert name == "eager" and np.abs(vectors - expected_pictures(tower, items)).max() <= 1e-5


def test_what_was_said_while_capturing() -> None:
    said: list[str] = []
    forward = BucketedForward(*runners(Pictures(), fakes.FailsAtCapture), PICTURES)
    forward.prepare(Pictures().golden_items(), said.append)
    assert "batch=4: capture with attention backend 'sdpa' failed: NPU out of memory. Tried to allocate 2 GiB" in said


def test_max_graphs_keeps_the_smallest() -> None:
    forward = forward_of(Pictures(), PICTURES, limits=GraphLimits(max_graphs=2))
    assert states(forward) == {"batch=1": "ready", "batch=2": "ready", "batch=4": "eager"}
    assert forward.records[-1].reason == "max_graphs allows 2 graphs, and there are smaller ones"
    assert forward.run(pictures_of(4)).runner == "eager"


def test_no_graphs_at_all() -> None:
    forward = forward_of(Pictures(), PICTURES, limits=GraphLimits(max_graphs=0))
    assert set(states(forward).values()) == {"eager"} and forward.run(pictures_of(1)).runner == "eager"


def test_graph_memory_is_capped() -> None:
    """The largest graph takes 3 MiB more than the others' 1 MiB each; what is over is released again."""

    class Heavy(Recorded):
        def capture(self, bucket: Bucket, inputs: Inputs) -> int:
            return super().capture(bucket, inputs) * (4 if bucket.batch == 4 else 1)

    runner, eager = runners(Pictures(), Heavy)
    assert isinstance(runner, Heavy)
    forward = BucketedForward(runner, eager, PICTURES, GraphLimits(memory_bytes=3 << 20))
    forward.prepare(Pictures().golden_items(), lambda message: None)
    assert states(forward) == {"batch=1": "ready", "batch=2": "ready", "batch=4": "eager"}
    assert forward.records[-1].reason == "its graph takes 4.0 MiB, and graph_memory_bytes leaves 3.0 MiB"
    assert runner.released == [Bucket(4)]
    assert sum(record.memory_bytes for record in forward.records) == 2 << 20


def test_graph_memory_is_counted_together() -> None:
    """What is left out is then the smallest, which the next larger one serves."""
    forward = forward_of(Pictures(), PICTURES, limits=GraphLimits(memory_bytes=2 << 20))
    assert states(forward) == {"batch=1": "eager", "batch=2": "ready", "batch=4": "ready"}
    assert forward.records[0].reason == "its graph takes 1.0 MiB, and graph_memory_bytes leaves 0.0 MiB"
    assert forward.run(pictures_of(1)).runner == "recorded"


def test_a_size_that_not_even_eager_bears_is_split_below_it() -> None:
    tower = Pictures()
    forward = forward_of(tower, PICTURES, fakes.FailsAtCapture, SmallEager)
    assert states(forward) == {"batch=1": "ready", "batch=2": "ready", "batch=4": "disabled"}
    last = forward.records[-1]
    assert not last.serves and "NPU out of memory" in last.reason and "eager fails at this size" in last.reason
    items = pictures_of(5)
    found = forward.run(items)
    vectors, name = found.vectors, found.runner
    assert name == "recorded" and forward.counters == {"graph_replay": 3}
    assert np.abs(vectors - expected_pictures(tower, items)).max() <= 1e-5


def test_a_graph_is_proved_by_smaller_batches_where_eager_bears_no_larger_ones() -> None:
    forward = forward_of(Pictures(), PICTURES, Recorded, SmallEager)
    assert states(forward) == {"batch=1": "ready", "batch=2": "ready", "batch=4": "ready"}
    assert [record.eager_ms > 0 for record in forward.records] == [True, True, False]
    wrong = forward_of(Pictures(), PICTURES, fakes.WrongAtFour, SmallEager)
    assert states(wrong) == {"batch=1": "ready", "batch=2": "ready", "batch=4": "disabled"}
    last = wrong.records[-1]
    assert not last.serves and last.reason.startswith("replay differs from eager: cosine")
    assert last.reason.endswith("; eager fails at this size: CUDA out of memory.")


def test_what_does_not_serve_is_no_yardstick_for_padding() -> None:
    """Two items: neither eager nor the graph of their size takes them, so the next larger one does."""

    class One(SmallEager):
        most = 1

    class WrongAtTwo(Recorded):
        def hand_out(self, bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
            return buffer.flip(-1) if bucket.batch == 2 else buffer.clone()

    forward = forward_of(Pictures(), [Bucket(1), Bucket(2), Bucket(8)], WrongAtTwo, One)
    assert states(forward) == {"batch=1": "ready", "batch=2": "disabled", "batch=8": "ready"}
    assert forward.run(pictures_of(2)).runner == "recorded"


def test_a_graph_without_an_eager_answer_is_not_trusted() -> None:
    with pytest.raises(RuntimeError, match="not even batch=1: eager fails at this size: CUDA out of memory"):
        forward_of(Pictures(), PICTURES, Recorded, fakes.NoEager)


def test_where_rounding_goes_by_the_size_of_a_batch_eager_of_that_size_is_asked() -> None:
    class ByTheBatch(Pictures):
        def forward(self, inputs: Inputs) -> TowerOutput:
            output = super().forward(inputs)
            return output._replace(vectors=output.vectors + 0.01 * len(output.vectors))

    forward = forward_of(ByTheBatch(), PICTURES)
    assert set(states(forward).values()) == {"ready"}
    assert all(record.max_abs_error is not None and record.max_abs_error < 1e-6 for record in forward.records)
    wrong = forward_of(ByTheBatch(), PICTURES, fakes.WrongAtFour)
    assert states(wrong) == {"batch=1": "ready", "batch=2": "ready", "batch=4": "disabled"}


def test_when_nothing_can_be_run_the_start_fails() -> None:
    with pytest.raises(RuntimeError, match=r"no batch can be run, not even batch=4: .*CUDA out of memory"):
        forward_of(Pictures(), [Bucket(4), Bucket(8)], EagerRunner, SmallEager)


def test_a_strict_backend_is_not_swallowed() -> None:
    class Strict(Recorded):
        def capture(self, bucket: Bucket, inputs: Inputs) -> int:
            raise Unsupported("attention backend 'x' does not take this call")

    with pytest.raises(Unsupported):
        forward_of(Pictures(), PICTURES, Strict)


def test_a_disabled_small_bucket_is_not_answered_by_a_much_larger_one() -> None:
    """One item in a bucket of eight would be a slow path taken in silence; in a bucket of two it is not."""

    class WrongBelow(Recorded):
        below = 0

        def hand_out(self, bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
            return buffer.flip(-1) if bucket.batch < self.below else buffer.clone()

    class Two(WrongBelow):
        below = 2

    class Eight(WrongBelow):
        below = 8

    buckets = [Bucket(1), Bucket(2), Bucket(8)]
    assert forward_of(Pictures(), buckets, Two).run(pictures_of(1)).runner == "recorded"
    forward = forward_of(Pictures(), buckets, Eight)
    assert states(forward) == {"batch=1": "disabled", "batch=2": "disabled", "batch=8": "ready"}
    assert forward.run(pictures_of(1)).runner == "eager" and forward.run(pictures_of(5)).runner == "recorded"


def test_a_runner_without_packed_batches_leaves_them_eager() -> None:
    tower = packed_tower()
    forward = forward_of(tower, PACKED, fakes.TakesNoPacked)
    assert set(states(forward).values()) == {"eager"}
    assert reasons(forward) == {"graph runner recorded takes no packed batches"}
    items = pictures([3, 9, 16, 1], seed=4)
    found = forward.run(items)
    vectors, name = found.vectors, found.runner
    assert name == "eager"
    assert np.abs(vectors - np.stack([alone(tower.module, item) for item in items])).max() <= 1e-5


@pytest.mark.parametrize("length", [1, 2])
def test_a_bucket_that_cannot_be_proved_is_left_eager(length: int) -> None:
    """With one golden item a replay would be held against what the graph was captured with."""
    forward = forward_of(Texts(), [Bucket(1, length), Bucket(1, 16)])
    assert states(forward) == {f"batch=1,length={length}": "eager", "batch=1,length=16": "ready"}
    assert forward.records[0].reason == "fewer than two golden items fit it, which its proof needs"


def test_without_graphs_every_bucket_is_timed_eager() -> None:
    forward = forward_of(Pictures(), PICTURES, EagerRunner)
    assert {(record.state, record.reason) for record in forward.records} == {("eager", "no graphs here")}
    assert all(record.eager_ms > 0 for record in forward.records) and forward.items_per_second() > 0


def test_release_gives_everything_back() -> None:
    forward, runner = watched(Pictures(), PICTURES)
    forward.release()
    assert not runner.static and sorted(runner.released) == PICTURES


def eager_rows(tower: Pictures) -> proof.Rows:
    """What eager, and so the proof, finds for the golden items."""
    output = tower.forward(tower.collate(tower.golden_items()))
    assert output.tokens is not None
    return proof.Rows(output.vectors.numpy(), list(output.tokens.numpy()))


def moved(rows: proof.Rows, error: float) -> proof.Rows:
    """As `RoundsApart` moves them."""

    def move(part: np.ndarray) -> np.ndarray:
        return part + error * np.eye(part.shape[-1], dtype=np.float32)[0]

    return proof.Rows(move(rows.vectors), [move(part) for part in rows.tokens])


@pytest.mark.parametrize(
    ("truth_at", "state"),
    [
        (None, "disabled"),  # nothing to judge by
        (0.0, "disabled"),  # eager is right
        (0.003, "disabled"),  # eager is nearer
        (0.005, "ready"),  # as near
        (0.01, "ready"),  # the replay is right
        (-0.01, "disabled"),  # twice as far
    ],
)
def test_a_replay_that_rounds_apart_is_judged_by_float32(truth_at: float | None, state: str) -> None:
    tower = Pictures()
    truth = None if truth_at is None else moved(eager_rows(tower), truth_at)
    forward = forward_of(tower, PICTURES, fakes.RoundsApart, truth=truth)
    assert set(states(forward).values()) == {state}
    assert all(record.max_abs_error is not None and record.max_abs_error > 1e-5 for record in forward.records)


def test_many_small_errors_are_more_than_one() -> None:
    tower = Pictures()
    forward = forward_of(tower, PICTURES, fakes.RoundsApartEverywhere, truth=moved(eager_rows(tower), 0.01))
    assert set(states(forward).values()) == {"disabled"}


@pytest.mark.parametrize("part", ["vectors", "features"])
def test_vectors_and_features_are_judged_apart(part: str) -> None:
    tower = Pictures()
    right, wrong = moved(eager_rows(tower), 0.01), eager_rows(tower)
    truth = proof.Rows(wrong.vectors, right.tokens) if part == "vectors" else proof.Rows(right.vectors, wrong.tokens)
    forward = forward_of(tower, PICTURES, fakes.RoundsApart, truth=truth)
    assert set(states(forward).values()) == {"disabled"}
    assert all((": features: " in reason) == (part == "features") for reason in reasons(forward))


def test_no_truth_makes_a_wrong_graph_right() -> None:
    tower = Pictures()
    for kind in (fakes.GivesNan, fakes.ShiftsRows, fakes.IgnoresInputs, fakes.WrongFeatures):
        forward = forward_of(tower, PICTURES[1:], kind, truth=eager_rows(tower))
        assert set(states(forward).values()) == {"disabled"}, kind.__name__
