"""Batches that are given to an NPU graph while another is computed: each gets its own vectors and its own lengths."""

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from encoder.graphs import proof
from tests.npu_sim.inside.test_npu_runner import PACKED, PICTURES, Rig, demo, packed, settled
from tests.support.checkpoints import worst_cosine
from tests.support.packed_tower import LAYERS, pictures


@pytest.fixture(autouse=True)
def any_speed_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "SLOWER_THAN_EAGER", 1e9)


def two_at_a_time(rig: Rig, asked: Sequence[Sequence[Any]]) -> None:
    assert rig.states == ["ready"] * 3, rig.reasons
    assert rig.forward.takes_ahead
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(rig.forward.run, asked))
    for items, found in zip(asked, answers, strict=True):
        assert found.runner == "npu" and found.trace.reason is None
        assert worst_cosine(found.vectors, rig.eagerly(items)) >= 0.9999
    assert settled()


def test_pictures_of_one_size() -> None:
    rig = Rig(demo(), PICTURES).prepare()
    golden = rig.tower.golden_items()
    two_at_a_time(rig, [golden[start : start + count] for count in (2, 1, 4) for start in range(5 - count)] * 2)


def test_packed_with_lengths_that_the_host_hands_over(simulator: Any) -> None:
    rig = Rig(packed(), PACKED).prepare()
    simulator.calls.clear()
    asked = [pictures(lengths, seed=seed) for seed in range(4) for lengths in ([3, 4], [16, 16, 16], [7, 9], [9, 7])]
    two_at_a_time(rig, asked)
    phases = [call.phase for call in simulator.calls.fused if call.phase != "eager"]
    assert phases == (["update"] * LAYERS + ["replay"] * LAYERS) * len(asked), "lengths of one, replay of another"
