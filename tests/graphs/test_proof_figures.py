"""What a proof measured of each bucket goes into its record, right or wrong."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from encoder.graphs import proof
from encoder.graphs.bucketed import BucketedForward
from encoder.graphs.runner import Bucket, GraphRecord, GraphRunner
from encoder.models.tower import TowerOutput
from tests.graphs import fakes
from tests.graphs.fakes import Pictures, Recorded, runners

BUCKETS = [Bucket(1), Bucket(2), Bucket(4)]


@pytest.fixture(autouse=True)
def any_speed_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "SLOWER_THAN_EAGER", 1e9)


def records(kind: type[GraphRunner], buckets: Sequence[Bucket] = BUCKETS) -> tuple[GraphRecord, ...]:
    forward = BucketedForward(*runners(Pictures(), kind), buckets)
    forward.prepare(Pictures().golden_items(), lambda message: None)
    return forward.records


class OffByALittle(Recorded):
    """At the first replay of each bucket, and within what is allowed."""

    def hand_out(self, bucket: Bucket, buffer: Any) -> Any:
        out = buffer.clone()
        if self.runs[bucket] == 1 and buffer is self.out[bucket][0]:
            out[0, 0] += 4e-6 * float(out[0].norm())
        return out


def test_the_worst_of_all_replays_is_kept() -> None:
    for record in records(OffByALittle):
        assert record.state == "ready" and record.max_abs_error is not None and record.worst_cosine is not None
        assert 2e-6 <= record.max_abs_error <= 1e-5 and 0.999999 <= record.worst_cosine < 1.000001


def test_a_bucket_that_is_wrong_says_by_how_much() -> None:
    for record in records(fakes.IgnoresInputs):
        assert record.state == "disabled" and record.worst_cosine is not None and record.worst_cosine < 0.99
        assert record.max_abs_error is not None and f"cosine {record.worst_cosine:.6f}" in record.reason


def test_nan_stays_nan() -> None:
    for record in records(fakes.GivesNan):
        assert record.worst_cosine is not None and np.isnan(record.worst_cosine)
        assert record.max_abs_error is not None and np.isnan(record.max_abs_error)


def test_without_a_replay_there_is_no_figure() -> None:
    assert {record.worst_cosine for record in records(fakes.FailsAtReplay)} == {None}


class LosesFeatures(Recorded):
    def run(self, *args: Any, **asked: Any) -> Any:
        output, trace = super().run(*args, **asked)
        return TowerOutput(output.vectors), trace


def test_features_that_are_missing_are_a_difference() -> None:
    assert {record.reason for record in records(LosesFeatures)} == {
        f"replay differs from eager: features of 0 items, not of {batch}" for batch in (1, 2, 4)
    }
