"""torch.compile as a graph runner: right numbers, a version for each bucket, and no other one after the start."""

import numpy as np
import pytest
import torch

from encoder.device import Device
from encoder.engine import Engine
from encoder.errors import Unsupported
from encoder.graphs import proof
from encoder.graphs.inductor import InductorRunner
from encoder.graphs.registry import choose_runner
from encoder.graphs.runner import Bucket
from encoder.settings import EngineSettings
from tests.graphs.fakes import CPU, Pictures, runners
from tests.graphs.forwards import PICTURES, expected_pictures, forward_of, pictures_of, states


@pytest.fixture(autouse=True)
def any_speed_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "SLOWER_THAN_EAGER", 1e9)


def test_every_bucket_gives_the_right_numbers() -> None:
    tower = Pictures()
    forward = forward_of(tower, PICTURES, InductorRunner)
    assert set(states(forward).values()) == {"ready"}
    for count in (1, 2, 3, 4):
        items = pictures_of(count)
        encoded = forward.run(items, tokens=True)
        assert encoded.runner == "inductor"
        assert np.abs(encoded.vectors - expected_pictures(tower, items)).max() <= 1e-5
        with torch.no_grad():
            features = tower.forward(tower.collate(items)).tokens
        assert features is not None and np.abs(np.stack(encoded.tokens) - features.numpy()).max() <= 1e-6


def test_a_shape_that_was_not_captured_is_an_error() -> None:
    tower = Pictures()
    runner, _ = runners(tower, InductorRunner)
    inputs = {count: tower.collate(pictures_of(count)) for count in (2, 3)}
    runner.capture(Bucket(2), inputs[2])
    runner.run(Bucket(2), inputs[2])
    with pytest.raises(RuntimeError, match="recompile"):
        runner.run(Bucket(3), inputs[3])


def test_more_versions_than_torch_keeps_by_itself_are_all_compiled() -> None:
    """Past eight versions of one piece of code torch goes on eager, and says nothing."""
    tower = Pictures()
    runner, _ = runners(tower, InductorRunner)
    counts = range(1, 12)
    for count in counts:
        runner.capture(Bucket(count), tower.collate(pictures_of(count)))
    for count in counts:
        items = pictures_of(count, seed=count)
        output, _ = runner.run(Bucket(count), tower.collate(items))  # a version that is missing is an error here
        assert np.abs(output.vectors.numpy() - expected_pictures(tower, items)).max() <= 1e-5


def test_it_is_never_on_by_itself_and_says_where_it_does_not_run() -> None:
    assert choose_runner("auto", CPU)[0].name == "openvino"
    assert choose_runner("inductor", CPU)[0] is InductorRunner
    with pytest.raises(Unsupported, match="not for cuda: use cuda-inductor"):
        choose_runner("inductor", Device("cuda", 0, "a gpu", "sm_90", 1 << 30))
    with pytest.raises(Unsupported, match="needs a CUDA device"):
        choose_runner("cuda-inductor", CPU)


@pytest.mark.long
@pytest.mark.parametrize("tower", ["vision", "text"])
def test_the_demo_model(tower: str) -> None:
    values = {"tower": tower, "dtype": "float32", "buckets": [1, 4], "text_lengths": [16]}
    engine, eager = (
        Engine.load(EngineSettings.model_validate({**values, "runner": runner})) for runner in ("inductor", "eager")
    )
    assert {(graph.runner, graph.state) for graph in engine.report().graphs} == {("inductor", "ready")}
    assert engine.report().counters["fused"] > 0
    assert np.abs(engine.golden_vectors() - eager.golden_vectors()).max() <= 1e-4
