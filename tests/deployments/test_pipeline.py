"""What an item takes of the device: by it callers that are refused are told when to come back."""

from types import SimpleNamespace

import pytest

from deployments import pipeline
from deployments.pipeline import Pipeline
from tests.deployments.formula import FormulaEngine, Prepared
from tests.deployments.plain_server import pool_settings


@pytest.mark.parametrize(
    ("lanes", "ahead", "alone", "expected_ms"),
    [
        (1, False, True, 50.0),  # two items in 100 ms
        (1, True, True, 50.0),
        (1, True, False, 25.0),  # half of the time it waited for the batch before
        (2, False, False, 25.0),  # as many again on the other lane
        (2, False, True, 50.0),
    ],
)
async def test_time_of_an_item(
    monkeypatch: pytest.MonkeyPatch, lanes: int, ahead: bool, alone: bool, expected_ms: float
) -> None:
    ticks = iter([10.0, 10.1])
    engine = FormulaEngine()
    engine.lanes, engine.takes_ahead = lanes, ahead
    measured = Pipeline(engine, pool_settings())
    monkeypatch.setattr(pipeline, "time", SimpleNamespace(monotonic=lambda: next(ticks)))
    items = [pipeline._Asked(Prepared(seed, False, False), tokens=False) for seed in (1, 2)]
    assert len(measured._forward(items, alone).vectors) == 2
    assert measured.ms_per_item == pytest.approx(expected_ms)
    monkeypatch.undo()
    await measured.close(5.0)
