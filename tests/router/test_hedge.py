"""Hedging: only when it is asked for, within the budget, and the first answer counts."""

import asyncio

import grpc
import pytest

from deployments.router.hedge import hedge_after_s
from deployments.router.sections import HedgeSettings

from .fake_pool import Failure, FakePool
from .harness import Fleet, eventually, failure_of, fleet, images, scrape

Code = grpc.StatusCode
SOON = (("x-hedge-after-ms", "50"),)


@pytest.mark.parametrize(
    ("settings", "asked_s", "expected"),
    [
        ({}, None, None),
        ({}, 0.2, 0.2),
        ({}, 0.001, 0.005),
        ({"by_metadata": False}, 0.2, None),
        ({"after_ms": 100}, None, 0.1),
        ({"after_ms": 100}, 0.2, 0.1),
        ({"after_ms": 100}, 0.05, 0.05),
        ({"after_ms": 100, "by_metadata": False}, 0.05, 0.1),
        ({"after_ms": 1}, None, 0.001),
    ],
)
def test_when_a_request_is_hedged(settings: dict[str, object], asked_s: float | None, expected: float | None) -> None:
    assert hedge_after_s(HedgeSettings.model_validate(settings), asked_s) == expected


async def slow_then_fast(started: Fleet, slow: FakePool) -> asyncio.Task[object]:
    """A hedged call that is under way at the slow pool."""
    slow.released.clear()

    async def call() -> object:
        return await started.stub.EncodeImages(images(b"x"), metadata=SOON, timeout=20)

    task = asyncio.create_task(call())
    await eventually(lambda: slow.in_flight == 1)
    return task


def two() -> tuple[FakePool, FakePool]:
    """The first one is chosen first."""
    return FakePool("vision-a"), FakePool("vision-b", latency_s=0.05)


async def test_a_slow_call_is_answered_by_another_pool_and_cancelled() -> None:
    slow, fast = two()
    async with fleet(slow, fast, metrics_port=0) as started:
        call = await slow_then_fast(started, slow)
        answer = await call
        assert answer.provenance.pool == "vision-b"
        await eventually(lambda: slow.cancelled == 1)
        await eventually(lambda: started.state("vision-a").speed.in_flight == 0)
        metrics = await scrape(started)
    assert (len(slow.requests), len(fast.requests)) == (1, 1)
    assert metrics['hedges_total{outcome="won",pool="vision-b"}'] == 1.0
    assert metrics['calls_total{code="OK",method="EncodeImages",pool="vision-b"}'] == 1.0
    assert metrics['pool_calls_total{code="CANCELLED",pool="vision-a"}'] == 1.0


async def test_the_first_pool_may_still_win() -> None:
    slow, slower = two()
    async with fleet(slow, slower, metrics_port=0) as started:
        slower.released.clear()
        call = await slow_then_fast(started, slow)
        await eventually(lambda: slower.in_flight == 1)
        slow.released.set()
        answer = await call
        assert answer.provenance.pool == "vision-a"
        await eventually(lambda: slower.cancelled == 1)
        metrics = await scrape(started)
    assert metrics['hedges_total{outcome="lost",pool="vision-b"}'] == 1.0


@pytest.mark.parametrize("wish", [None, "0", "-5", "soon", "nan", "inf"])
async def test_nothing_is_hedged_unless_it_is_asked_for(wish: str | None) -> None:
    pool = FakePool("vision-a")
    async with fleet(pool) as started:
        pool.released.clear()
        metadata = (("x-hedge-after-ms", wish),) if wish is not None else ()
        call = started.stub.EncodeImages(images(b"x"), metadata=metadata, timeout=0.5)
        assert (await failure_of(call)).code() is Code.DEADLINE_EXCEEDED
    assert len(pool.requests) == 1


async def test_callers_can_be_kept_from_asking_for_it() -> None:
    slow, fast = two()
    async with fleet(slow, fast, hedge={"by_metadata": False}) as started:
        call = await slow_then_fast(started, slow)
        await asyncio.sleep(0.3)
        assert not fast.requests
        slow.released.set()
        await call


async def test_by_setting_every_call_is_hedged_and_quick_ones_need_none() -> None:
    slow, fast = two()
    async with fleet(slow, fast, hedge={"after_ms": 400}) as started:
        for _ in range(3):
            await started.stub.EncodeImages(images(b"x"), timeout=10)
        assert len(slow.requests) + len(fast.requests) == 3
        slow.released.clear()
        answer = await started.stub.EncodeImages(images(b"x"), timeout=10)
        assert answer.provenance.pool == "vision-b"


async def test_hedges_come_out_of_the_retry_budget() -> None:
    pool = FakePool("vision-a")
    async with fleet(pool, retry={"budget_burst": 2.0, "budget_ratio": 0.0}) as started:
        for calls in (2, 2, 1):
            pool.released.clear()
            call = started.stub.EncodeImages(images(b"x"), metadata=SOON, timeout=20)
            await eventually(lambda calls=calls: pool.in_flight == calls)
            await asyncio.sleep(0.2)  # four times what a hedge waits
            assert pool.in_flight == calls
            pool.released.set()
            await call
            await eventually(lambda: pool.in_flight == 0)


async def test_a_pinned_request_is_hedged_at_its_own_pool() -> None:
    pool, other = two()
    async with fleet(pool, other) as started:
        pool.released.clear()
        call = started.stub.EncodeImages(images(b"x", pool="vision-a"), metadata=SOON, timeout=20)
        await eventually(lambda: pool.in_flight == 2)
        pool.released.set()
        await call
    assert not other.requests


async def test_a_hedge_that_fails_leaves_the_first_call_alone() -> None:
    slow, failing = two()
    async with fleet(slow, failing) as started:
        failing.failures.append(Failure(Code.UNAVAILABLE, "draining"))
        call = await slow_then_fast(started, slow)
        await eventually(lambda: len(failing.requests) == 1 and not failing.failures)
        await asyncio.sleep(0.1)
        slow.released.set()
        answer = await call
    assert answer.provenance.pool == "vision-a"


async def test_when_both_fail_the_request_is_tried_again() -> None:
    slow, failing = two()
    async with fleet(slow, failing, retry={"attempts": 3}) as started:
        failing.failures.append(Failure(Code.UNAVAILABLE, "draining"))
        slow.failures.append(Failure(Code.UNAVAILABLE, "draining"))
        call = await slow_then_fast(started, slow)
        await eventually(lambda: len(failing.requests) == 1 and not failing.failures)
        slow.released.set()
        await call
        assert len(slow.requests) + len(failing.requests) == 3


async def test_a_failure_that_no_other_try_mends_is_not_hidden_by_the_hedge() -> None:
    slow, failing = two()
    async with fleet(slow, failing) as started:
        failing.failures.append(Failure(Code.UNAVAILABLE, "draining"))
        slow.failures.append(Failure(Code.INVALID_ARGUMENT, "no such dtype"))
        call = await slow_then_fast(started, slow)
        await eventually(lambda: len(failing.requests) == 1 and not failing.failures)
        slow.released.set()
        error = await failure_of(call)
    assert error.code() is Code.INVALID_ARGUMENT
    assert len(slow.requests) + len(failing.requests) == 2


async def test_a_client_that_goes_away_cancels_both() -> None:
    first, second = two()
    async with fleet(first, second) as started:
        for pool in (first, second):
            pool.released.clear()
        call = started.stub.EncodeImages(images(b"x"), metadata=SOON, timeout=20)
        await eventually(lambda: first.in_flight == second.in_flight == 1)
        call.cancel()
        await eventually(lambda: first.cancelled == second.cancelled == 1)
