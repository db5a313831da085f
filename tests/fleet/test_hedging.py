"""Hedging before a whole fleet: a pool that is slow beside one that is fast.

The CPU pool's only replica is stopped for a while, shorter than Serve's patience: to its callers it is a slow one.
"""

import asyncio
import signal

import numpy as np
import pytest

from encoder.v1 import encoder_pb2 as pb
from tests.fleet.conftest import CPU, NPU
from tests.fleet.gateway import gateway
from tests.fleet.load import ATOL, Oracle, pictures
from tests.fleet.machine import Machine
from tests.router.harness import Fleet, eventually, images, numbers, scrape

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1800)]
HEDGED = (("x-hedge-after-ms", "100"),)
# Enough at once that the pool which has stopped to answer gets some before the router sees how slow it is.
CALLS, DEADLINE_S = 30, 120.0


async def test_slow_calls_are_answered_by_the_fast_pool_and_counted(whole_fleet: Machine, oracle: Oracle) -> None:
    files = pictures()

    async def call(number: int) -> pb.EncodeImagesResponse:
        one = files[number % len(files)]
        answer = await router.stub.EncodeImages(images(one), metadata=HEDGED, timeout=DEADLINE_S)
        found = numbers(answer.results[0].embedding)
        np.testing.assert_allclose(found, oracle.images[number % len(files)], atol=ATOL)
        return answer

    # Hedges come out of this budget: enough for every call.
    async with gateway(whole_fleet, retry={"budget_burst": 1000.0}) as router:
        await asyncio.gather(*(call(number) for number in range(CALLS)))
        before = await scrape(router)
        (pid,) = whole_fleet.replicas(CPU).values()
        whole_fleet.kill(pid, signal.SIGSTOP)
        try:
            answers = await asyncio.gather(*(call(number) for number in range(CALLS)))
            # It was stopped all the while, so nobody else can have answered.
            assert {answer.provenance.pool for answer in answers} == {NPU}
        finally:
            whole_fleet.kill(pid, signal.SIGCONT)
        after = await scrape(router)
        grown = {name: value - before.get(name, 0.0) for name, value in after.items()}
        assert grown[f'hedges_total{{outcome="won",pool="{NPU}"}}'] > 0
        assert grown[f'pool_calls_total{{code="CANCELLED",pool="{CPU}"}}'] > 0
        # Of two calls one answers and the other is cancelled, unless both have answered.
        assert total(grown, "pool_calls_total", 'code="CANCELLED"') <= total(grown, "hedges_total")
        await slow_pool_comes_back(router, whole_fleet, pid)


def total(metrics: dict[str, float], name: str, label: str = "") -> float:
    return sum(value for key, value in metrics.items() if key.startswith(name + "{") and label in key)


async def slow_pool_comes_back(router: Fleet, fleet: Machine, pid: int) -> None:
    """It was slow, not lost: the same process answers again."""
    await eventually(lambda: router.state(CPU).healthy, DEADLINE_S)
    pinned = images(pictures()[0], pool=CPU)
    answer = await router.stub.EncodeImages(pinned, timeout=DEADLINE_S)
    assert answer.provenance.pool == CPU
    assert answer.results[0].HasField("embedding")
    assert list(fleet.replicas(CPU).values()) == [pid]
