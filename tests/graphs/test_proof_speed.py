"""A graph that is slower than eager is found out, and eager is timed only where it may be the quicker one."""

from collections.abc import Callable

import pytest
import torch

from encoder.graphs import answers, proof
from encoder.graphs.answers import EagerAnswers
from encoder.graphs.eager import EagerRunner
from encoder.graphs.lanes import with_lanes
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

    def timed(runner: GraphRunner, bucket: Bucket, inputs: Inputs) -> tuple[TowerOutput, float]:
        output = measured(runner, bucket, inputs)[0]
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
