"""Ejection: on a clock that the test moves, and over real sockets."""

import io
import json
import time

import grpc
import pytest

from deployments.router.ejection import Ejection
from deployments.router.sections import EjectionSettings
from encoder.v1 import encoder_pb2 as pb

from .fake_pool import Failure, FakePool
from .harness import eventually, failure_of, fleet, images, scrape

Code = grpc.StatusCode
BOOM = Failure(Code.INTERNAL, "the forward failed")


def ejection(**values: float) -> Ejection:
    """Only failures in a row count, unless `values` say otherwise."""
    lone = {"consecutive_failures": 3, "min_calls": 10**6, "base_s": 10.0, "max_s": 60.0}
    return Ejection(EjectionSettings.model_validate({**lone, **values}))


def calls(pool: Ejection, outcomes: str, now: float, seconds: float = 0.1) -> list[bool]:
    """Notes `.` for calls that succeed and `x` for those that fail; which of them eject."""
    return [pool.record(outcome == "x", seconds, now) for outcome in outcomes]


def test_failures_in_a_row_eject() -> None:
    pool = ejection()
    assert calls(pool, "xx.xx.xx", 0.0) == [False] * 8
    assert not pool.is_out(0.0)
    assert calls(pool, "x", 0.0) == [True]
    assert pool.reason == "left out for 10 s: 3 calls in a row failed"
    assert (pool.is_out(0.0), pool.is_out(9.9), pool.is_out(10.0)) == (True, True, False)


def test_the_share_of_failures_in_a_window_ejects() -> None:
    pool = ejection(consecutive_failures=10**6, error_rate=0.5, min_calls=10, window_s=10.0)
    assert not any(calls(pool, "x.x.x.x.", 0.0))
    # A new window begins from nothing.
    assert not any(calls(pool, "xxxx", 10.0))
    assert not any(calls(pool, ".....", 11.0))
    assert calls(pool, "x", 12.0) == [True]  # 5 of 10
    assert "5 of 10 calls failed" in pool.reason


def test_what_ends_while_a_pool_is_out_tells_nothing_new() -> None:
    pool = ejection()
    calls(pool, "xxx", 0.0)
    assert not any(calls(pool, "xxxxxx", 5.0))
    assert not pool.is_out(10.0)


def test_on_trial_one_failure_ejects_again_for_twice_as_long() -> None:
    pool = ejection()
    calls(pool, "xxx", 0.0)
    assert calls(pool, "x", 10.0) == [True]
    assert (pool.is_out(29.9), pool.is_out(30.0)) == (True, False)
    assert calls(pool, "x", 30.0) == [True]
    assert (pool.is_out(69.9), pool.is_out(70.0)) == (True, False)
    # Never longer than max_s, however often.
    now = 70.0
    for _ in range(2000):
        assert calls(pool, "x", now) == [True]
        assert pool.is_out(now + 59.9)
        assert not pool.is_out(now + 60.0)
        now += 60.0


def test_on_trial_one_success_ends_the_trial() -> None:
    pool = ejection()
    calls(pool, "xxx", 0.0)
    assert not any(calls(pool, ".xx", 10.0))
    assert calls(pool, "x", 10.0) == [True]
    # Not long enough in since: the next one lasts longer.
    assert pool.is_out(29.9)


def test_a_pool_that_stayed_in_as_long_as_it_was_out_starts_anew() -> None:
    pool = ejection()
    calls(pool, "xxx", 0.0)
    calls(pool, ".", 10.0)
    calls(pool, "xxx", 21.0)
    assert (pool.is_out(30.9), pool.is_out(31.0)) == (True, False)


def test_slow_calls_count_as_failed_where_that_is_asked_for() -> None:
    assert not any(calls(ejection(), "....", 0.0, seconds=1000.0))
    pool = ejection(slow_s=2.0)
    assert not any(calls(pool, "....", 0.0, seconds=1.9))
    assert calls(pool, "...", 0.0, seconds=2.1) == [False, False, True]


def test_calls_that_were_given_up_count_only_when_they_were_slow() -> None:
    pool = ejection(slow_s=2.0)
    assert not any(pool.record_given_up(1.9, 0.0) for _ in range(10))
    assert [pool.record_given_up(2.1, 0.0) for _ in range(3)] == [False, False, True]
    assert not any(ejection().record_given_up(1e6, 0.0) for _ in range(10))


async def test_a_pool_that_fails_calls_though_its_probes_pass_is_left_out_and_tried_again(lines: io.StringIO) -> None:
    # It is the quicker one, so it would be chosen.
    bad, good = FakePool("vision-bad"), FakePool("vision-good", latency_s=0.05)
    settings = {"consecutive_failures": 3, "base_s": 4.0}
    async with fleet(bad, good, ejection=settings, retry={"attempts": 1}, metrics_port=0) as started:
        bad.failures.extend([BOOM] * 4)

        async def pinned_call() -> grpc.StatusCode:
            request = images(b"x", pool="vision-bad")
            return (await failure_of(started.stub.EncodeImages(request, timeout=10))).code()

        async def who_answers(calls: int) -> set[str]:
            at_once = [started.stub.EncodeImages(images(b"x"), timeout=10) for _ in range(calls)]
            return {(await call).provenance.pool for call in at_once}

        assert [await pinned_call() for _ in range(3)] == [Code.INTERNAL] * 3
        assert await who_answers(20) == {"vision-good"}
        assert started.state("vision-bad").healthy
        report = await started.stub.GetBackendReport(pb.GetBackendReportRequest(pool="vision-bad"), timeout=10)
        assert report.pools[0].healthy
        assert report.pools[0].reason == "left out for 4 s: 3 calls in a row failed"
        metrics = await scrape(started)
        assert metrics['ejections_total{pool="vision-bad"}'] == 1.0
        assert metrics['pool_ejected{pool="vision-bad"}'] == 1.0
        # Asked for by name it is used all the same.
        assert await pinned_call() is Code.INTERNAL
        # It comes back by itself.
        await eventually(lambda: not started.state("vision-bad").ejection.is_out(time.monotonic()))
        assert "vision-bad" in await who_answers(20)
    ejected = [json.loads(line) for line in lines.getvalue().splitlines() if "pool_ejected" in line]
    assert [(line["level"], line["pool"]) for line in ejected] == [("WARNING", "vision-bad")]


async def test_the_last_pool_is_never_left_out() -> None:
    pool = FakePool("vision-a")
    async with fleet(pool, ejection={"consecutive_failures": 1, "base_s": 600.0}, retry={"attempts": 1}) as started:
        pool.failures.append(BOOM)
        await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
        await started.stub.EncodeImages(images(b"x"), timeout=10)


@pytest.mark.parametrize(
    "failure",
    [
        Failure(Code.INVALID_ARGUMENT, "513 images are above the limit"),
        Failure(Code.RESOURCE_EXHAUSTED, "queue full"),
        Failure(Code.NOT_FOUND, "model 'x' is not served"),
        Failure(Code.DEADLINE_EXCEEDED, "Request timed out"),
    ],
    ids=lambda failure: failure.code.name,
)
async def test_what_a_caller_can_bring_about_ejects_nobody(failure: Failure) -> None:
    first, second = FakePool("vision-a"), FakePool("vision-b")
    async with fleet(first, second, ejection={"consecutive_failures": 1}, retry={"attempts": 1}) as started:
        first.failures.extend([failure] * 3)
        for _ in range(3):
            await failure_of(started.stub.EncodeImages(images(b"x", pool="vision-a"), timeout=10))
        assert started.state("vision-a").ejection.reason == ""


async def test_a_callers_short_deadline_ejects_nobody_and_a_slow_pool_is_ejected_by_its_time() -> None:
    first, second = FakePool("vision-a"), FakePool("vision-b")
    limits = {"consecutive_failures": 1, "slow_s": 0.5, "base_s": 600.0}
    async with fleet(first, second, ejection=limits, retry={"attempts": 1}) as started:
        first.released.clear()
        error = await failure_of(started.stub.EncodeImages(images(b"x", pool="vision-a"), timeout=0.1))
        assert error.code() is Code.DEADLINE_EXCEEDED
        assert started.state("vision-a").ejection.reason == ""
        error = await failure_of(started.stub.EncodeImages(images(b"x", pool="vision-a"), timeout=1.5))
        assert error.code() is Code.DEADLINE_EXCEEDED
        await eventually(lambda: "left out" in started.state("vision-a").ejection.reason)
