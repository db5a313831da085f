"""A graph that is slower than eager is found out, and eager is timed only where it may be the quicker one."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from encoder.attention.dispatch import CallTrace
from encoder.graphs import answers, proof
from encoder.graphs.answers import EagerAnswers
from encoder.graphs.bucketed import BucketedForward
from encoder.graphs.eager import EagerRunner
from encoder.graphs.lanes import with_lanes
from encoder.graphs.plan import BatchPlan
from encoder.graphs.runner import Bucket, GraphRunner
from encoder.models.tower import Inputs, TowerOutput
from tests.graphs.fakes import Pictures, Recorded, Texts, packed_tower, runners
from tests.graphs.forwards import PACKED, PICTURES, TEXTS, forward_of, reasons, states

LARGER = [Bucket(1), Bucket(2), Bucket(4), Bucket(8), Bucket(32)]
# Of ViT-B/32 in bfloat16 on a CPU.
MEASURED = {1: 47.0, 2: 75.0, 4: 146.0, 8: 269.0, 16: 501.0, 32: 954.0}

Eager = Callable[[int], float]
Replay = Callable[[Bucket, int], float]


def scripted(monkeypatch: pytest.MonkeyPatch, replay: Replay, eager: Eager = lambda items: 10.0) -> list[int]:
    """Eager takes what `eager` says of its items, a bucket's nth replay what `replay` says. Gives eager's batches."""
    monkeypatch.setattr(proof, "SLOWER_THAN_EAGER", 1.1)
    measured, batches = answers.timed, []

    def timed(runner: GraphRunner, bucket: Bucket, inputs: Inputs, *, tokens: bool = True) -> tuple[TowerOutput, float]:
        output = measured(runner, bucket, inputs, tokens=tokens)[0]
        if isinstance(runner, Recorded):
            return output, replay(bucket, runner.runs[bucket])
        batches.append(len(next(iter(inputs.values()))))
        return output, eager(batches[-1])

    monkeypatch.setattr(proof, "timed", timed)
    monkeypatch.setattr(answers, "timed", timed)
    return batches


def test_a_graph_that_is_slower_than_eager_is_disabled(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, lambda bucket, count: 12.0)
    forward = forward_of(Pictures(), PICTURES)
    assert set(states(forward).values()) == {"disabled"}
    assert reasons(forward) == {"replay takes 12.0 ms, eager 10.0 ms"}
    assert forward.items_per_second() == pytest.approx(400)  # eager's: 4 items in 10 ms


@pytest.mark.parametrize(("took", "state", "rate"), [(21.0, "ready", 2 * 2 / 0.021), (24.0, "disabled", 2 / 0.01)])
def test_lanes_share_the_device_which_eager_has_to_itself(
    monkeypatch: pytest.MonkeyPatch, took: float, state: str, rate: float
) -> None:
    """Half of 21 ms is what a replay takes of the device, where eager takes 10 ms of all of it."""
    scripted(monkeypatch, lambda bucket, count: took if bucket.lanes == 2 else 10.0)
    forward = forward_of(Pictures(), with_lanes([Bucket(1), Bucket(4)], 2))
    assert states(forward) == {"batch=1": "ready", "batch=1,lanes=2": state, "batch=2,lanes=2": state}
    assert forward.items_per_second() == pytest.approx(rate)
    assert reasons(forward) == {""} | (
        {"replay takes 24.0 ms on each of 2 lanes, eager 10.0 ms"} if state == "disabled" else set()
    )


@pytest.mark.parametrize("quick", [1, 2, 5])
def test_one_undisturbed_measurement_is_enough(quick: int, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, lambda bucket, count: 8.0 if count == quick else 60.0)
    forward = forward_of(Pictures(), PICTURES)
    assert set(states(forward).values()) == {"ready"}
    assert {record.replay_ms for record in forward.records} == {8.0}
    assert forward.items_per_second() == pytest.approx(500)


class Noting(Recorded):
    """Notes at which replays features were asked for."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.asked: defaultdict[Bucket, list[bool]] = defaultdict(list)

    def run(self, bucket: Bucket, inputs: Inputs, *, tokens: bool = False) -> tuple[TowerOutput, CallTrace]:
        self.asked[bucket].append(tokens)
        return super().run(bucket, inputs, tokens=tokens)


def noting(buckets: Sequence[Bucket], kind: type[Noting] = Noting) -> tuple[BucketedForward, Noting]:
    runner, eager = runners(Pictures(), kind)
    assert isinstance(runner, Noting)
    forward = BucketedForward(runner, eager, buckets)
    forward.prepare(Pictures().golden_items(), lambda message: None)
    return forward, runner


def test_a_bucket_that_was_disturbed_in_its_proof_is_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else four and four would go for eight for good."""
    truth = {1: 2.0, 2: 3.0, 4: 5.0, 8: 8.0, 32: 30.0}
    busy = {8: 3, 32: 4}
    scripted(
        monkeypatch,
        lambda bucket, count: truth[bucket.batch] * (2 if count <= busy.get(bucket.batch, 0) else 1),
        lambda items: 100.0 * items,
    )
    forward, runner = noting(LARGER)
    assert {record.bucket.batch: record.replay_ms for record in forward.records} == truth
    assert set(map(tuple, runner.asked.values())) == {(True, True, False, False, False)}
    assert BatchPlan(forward.records).choose([1] * 8) == list(range(8))


@pytest.mark.parametrize(("longest", "rounds"), [(100.0, 3), (1000.0, 3), (1301.0, 0)])
def test_only_rounds_that_fit_into_the_time_are_begun(
    longest: float, rounds: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    scripted(monkeypatch, lambda bucket, count: longest if bucket.batch == 4 else 1.0, lambda items: 1e5)
    _, runner = noting(PICTURES)
    assert {len(asked) for asked in runner.asked.values()} == {2 + rounds}


class FailsLater(Noting):
    def copy_in(self, bucket: Bucket, inputs: Inputs) -> None:
        if bucket.batch == 2 and self.runs[bucket] == 4:
            raise RuntimeError("the device is gone")
        super().copy_in(bucket, inputs)


def test_a_replay_that_fails_when_it_is_timed_again_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "SLOWER_THAN_EAGER", 1e9)
    forward, runner = noting(PICTURES, FailsLater)
    assert states(forward) == {"batch=1": "ready", "batch=2": "disabled", "batch=4": "ready"}
    assert reasons(forward) == {"", "replay failed: the device is gone"} and runner.released == [Bucket(2)]


def test_packed_batches_are_not_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "SLOWER_THAN_EAGER", 1e9)
    runner, eager = runners(packed_tower(), Recorded)
    assert isinstance(runner, Recorded)
    BucketedForward(runner, eager, PACKED).prepare(packed_tower().golden_items(), lambda message: None)
    assert set(runner.runs.values()) == {2}


def test_eager_runs_once_for_all_where_every_graph_is_quicker(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = scripted(monkeypatch, lambda bucket, count: 20.0 * bucket.batch, lambda items: 10 + 30.0 * items)
    forward = forward_of(Pictures(), LARGER)
    assert set(states(forward).values()) == {"ready"} and batches == [4, 1, 4]
    assert [record.eager_ms for record in forward.records] == [40, 0, 130, 0, 0]


def test_texts_are_asked_of_eager_once_for_each_length(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = scripted(monkeypatch, lambda bucket, count: 1.0 * bucket.batch, lambda items: 10 + 30.0 * items)
    forward = forward_of(Texts(), TEXTS)
    # Golden texts have 3, 5, 12 and 2 tokens: two fit four tokens, three fit eight, all fit sixteen.
    assert set(states(forward).values()) == {"ready"} and batches == [2, 1, 2, 3, 1, 3, 4, 1, 4]


def test_each_packed_batch_is_run_eager(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = scripted(monkeypatch, lambda bucket, count: 1.0, float)
    forward = forward_of(packed_tower(), PACKED)
    # A millisecond a token; golden items have 7, 12, 3 and 16 of them.
    assert [record.eager_ms for record in forward.records] == [3, 3, 7, 22] and len(batches) >= len(PACKED)


@pytest.mark.parametrize("slow", [Bucket(2), Bucket(8), Bucket(32)])
def test_one_slow_graph_among_quick_ones_is_disabled(slow: Bucket, monkeypatch: pytest.MonkeyPatch) -> None:
    def eager(items: int) -> float:
        return 10 + 30.0 * items

    scripted(monkeypatch, lambda bucket, count: eager(bucket.batch) * (1.12 if bucket == slow else 0.8), eager)
    forward = forward_of(Pictures(), LARGER)
    assert {record.bucket for record in forward.records if record.state == "disabled"} == {slow}
    took = eager(slow.batch)
    assert f"replay takes {took * 1.12:.1f} ms, eager {took:.1f} ms" in reasons(forward)


def test_where_starting_kernels_takes_longest_a_small_batch_says_nothing_of_a_large_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Per item, 13 ms for 32 are less than the 10 ms that eager takes for four, but eager's 32 take 11 ms."""
    scripted(monkeypatch, lambda bucket, count: 5.0 if bucket.batch < 32 else 13.0, lambda items: max(10.0, items / 3))
    forward = forward_of(Pictures(), LARGER)
    assert states(forward) == {str(bucket): "disabled" if bucket.batch == 32 else "ready" for bucket in LARGER}
    assert "replay takes 13.0 ms, eager 10.7 ms" in reasons(forward)


class Counted(EagerRunner):
    """Gives nothing but times."""

    def run(self, bucket: Bucket, inputs: Inputs, *, tokens: bool = False) -> tuple[TowerOutput, object]:  # type: ignore[override]
        return TowerOutput(torch.zeros(len(inputs["pixels"]), 5)), None


@pytest.mark.parametrize(
    ("runs", "batch", "least"),
    [
        ([], 4, 0),
        ([4], 4, 146),
        ([4], 1, 146 / 4),
        ([4], 32, 146),
        ([1, 4], 2, 146 / 2),
        ([1, 4], 32, 146 + 28 * (146 - 47) / 3),
        ([1, 4, 32], 16, 954 / 2),
        ([4, 8, 16], 32, 501 + 16 * (501 - 146) / 12),
    ],
)
def test_what_eager_takes_at_least(runs: list[int], batch: int, least: float, monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, lambda bucket, count: 0.0, MEASURED.__getitem__)
    eager = runners(Pictures(), Recorded, Counted)[1]
    found = EagerAnswers(eager, Pictures().golden_items(), [Bucket(32)])
    for size in runs:
        found.run(Bucket(size), [0])
    assert found.at_least(Bucket(batch)) == pytest.approx(least)
    assert found.at_least(Bucket(batch)) <= 1.13 * MEASURED.get(batch, least)


def test_lengths_are_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    scripted(monkeypatch, lambda bucket, count: 0.0)
    found = EagerAnswers(runners(Texts(), Recorded)[1], Texts().golden_items(), TEXTS)
    found.run(Bucket(4, 16), [0])
    assert found.at_least(Bucket(4, 16)) == 10 and found.at_least(Bucket(4, 8)) == 0
