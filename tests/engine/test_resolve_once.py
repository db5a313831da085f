"""The raw setting is read once: changed or deleted after that, it changes nothing, in eager and in capture."""

from collections.abc import Callable

import numpy as np
import pytest

from encoder.engine import Engine
from encoder.graphs import proof
from encoder.settings import EngineSettings

Spoil = Callable[[EngineSettings], None]


@pytest.fixture(autouse=True)
def any_speed_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "SLOWER_THAN_EAGER", 1e9)


def change(settings: EngineSettings) -> None:
    settings.__dict__["attention_backend"] = "flashy"


def delete(settings: EngineSettings) -> None:
    settings.__dict__.pop("attention_backend", None)


def mutate_to_none(settings: EngineSettings) -> None:
    settings.__dict__["attention_backend"] = None


SPOILS = pytest.mark.parametrize("spoil", [change, delete, mutate_to_none])
RUNNERS = pytest.mark.parametrize("runner", ["eager", "openvino"])


def settings(runner: str, tower: str = "text") -> EngineSettings:
    return EngineSettings.model_validate(
        {"tower": tower, "attention_backend": "reference", "runner": runner, "dtype": "float32", "buckets": [1, 4]}
    )


@RUNNERS
@SPOILS
def test_spoilt_before_capture(spoil: Spoil, runner: str) -> None:
    """As soon as the backend is resolved, which is before anything is captured."""
    asked = settings(runner)

    def progress(message: str) -> None:
        if message.startswith("capture"):
            spoil(asked)

    engine = Engine.load(asked, progress)
    report = engine.report()
    assert (report.backend.name, report.backend.source) == ("reference", "server")
    assert {graph.backend for graph in report.graphs} == {"reference"}
    assert all(graph.state in ("ready", "eager") for graph in report.graphs)
    assert {check.backend for check in report.self_checks} == {"reference"}


@RUNNERS
@SPOILS
def test_spoilt_while_serving(spoil: Spoil, runner: str) -> None:
    asked = settings(runner)
    engine = Engine.load(asked)
    before = engine.golden_vectors()
    spoil(asked)
    assert np.array_equal(engine.golden_vectors(), before)
    assert engine.report().backend.name == "reference"


@RUNNERS
def test_the_setting_is_not_mutated(runner: str) -> None:
    asked = settings(runner)
    untouched = asked.model_dump()
    Engine.load(asked)
    assert asked.model_dump() == untouched
