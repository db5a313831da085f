"""What an item takes of the device: by it callers that are refused are told when to come back."""

import asyncio
import time
from types import SimpleNamespace

import pytest

from deployments import pipeline
from deployments.pipeline import Pipeline
from encoder.engine import RawPixels
from tests.deployments.formula import FormulaEngine, Prepared
from tests.deployments.plain_server import pool_settings
from tests.test_batching import until


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


class SlowDecoding(FormulaEngine):
    """A picture takes 10 ms to decode, and the pool's processors may be those of the forward."""

    def __init__(self, shares: bool) -> None:
        super().__init__()
        self.shares = shares
        self.asked: list[int] = []

    def shares_processors(self, preparing: int) -> bool:
        self.asked.append(preparing)
        return self.shares

    def prepare_image(self, source: bytes | RawPixels) -> Prepared:
        time.sleep(0.01)
        return super().prepare_image(source)


@pytest.mark.parametrize("shares", [True, False])
async def test_pictures_of_a_request_are_computed_together_where_decoding_is_in_the_way(shares: bool) -> None:
    engine = SlowDecoding(shares)
    replica = Pipeline(engine, pool_settings(decode_threads=1))
    assert engine.asked == [1]
    replica._batcher._item_s = 3600.0  # of a forward that is worth waiting for
    pictures = [lambda: b"one", lambda: b"bad", lambda: b"three"]
    outcomes = await replica.encode_images(pictures, replica.caller())
    assert [outcome.error is None for outcome in outcomes] == [True, False, True]
    assert engine.batches == ([2] if shares else [1, 1])
    await replica.close(5.0)


async def test_who_gives_up_while_decoding_is_not_waited_for() -> None:
    engine = SlowDecoding(shares=True)
    engine.decode_gate.clear()
    replica = Pipeline(engine, pool_settings(decode_threads=2))
    replica._batcher._item_s = 3600.0
    gone = asyncio.create_task(replica.encode_images([lambda: b"gone"], replica.caller()))
    await asyncio.sleep(0.05)
    gone.cancel()
    engine.decode_gate.set()
    async with asyncio.timeout(10):
        await replica.encode_images([lambda: b"kept"], replica.caller())
    assert engine.batches == [1]
    await replica.close(5.0)


async def test_pictures_that_wait_for_a_thread_are_on_their_way() -> None:
    """All that were being decoded are through at once, as when the loop was busy, and the rest has yet to begin."""
    engine = FormulaEngine()
    engine.shares = True
    replica = Pipeline(engine, pool_settings(decode_threads=1))
    await replica.encode_images([lambda: b"the first of all"], replica.caller())
    engine.decode_gate.clear()
    replica._batcher._item_s = 3600.0
    request = asyncio.create_task(replica.encode_images([lambda: b"one"] * 4, replica.caller()))
    await until(lambda: engine.decodes == 2)
    engine.decode_gate.set()
    time.sleep(0.1)  # noqa: ASYNC251 - the loop is busy
    assert engine.decodes == 3
    await request
    assert engine.batches == [1, 4]
    await replica.close(5.0)
