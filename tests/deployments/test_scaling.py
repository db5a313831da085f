"""How many replicas: values computed by hand, and what Serve is told."""

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

import pytest

from deployments.pool import pool_deployment
from deployments.scaling import QUEUE_AGE_KEY, QueueAgePolicy, replicas_for
from deployments.settings import parse_pool_settings
from encoder.batching import Batcher
from encoder.errors import InvalidInput
from tests.test_batching import Forward, until


@pytest.mark.parametrize(
    ("replicas", "calls", "age_s", "expected"),
    [
        # 12 calls of 8 each ask for 1.5 replicas; nothing waits.
        (1, 12, 0.0, 1.5),
        # Few calls, but work waits 1.5 times as long as it may: half as many replicas again.
        (2, 4, 3.0, 3.0),
        # However old the queue, twice as many at most.
        (2, 4, 900.0, 4.0),
        # Calls may ask for more than the age does.
        (1, 40, 2.5, 5.0),
        # Just under the target the pool keeps its size; well under it calls decide.
        (3, 4, 2.0, 3.0),
        (3, 4, 1.5, 3.0),
        (3, 4, 1.0, 0.5),
        (3, 0, 0.0, 0.0),
    ],
)
def test_replicas_by_calls_and_by_age(replicas: int, calls: float, age_s: float, expected: float) -> None:
    assert replicas_for(replicas, calls, 8.0, age_s, 2.0) == pytest.approx(expected)


@dataclass
class Context:
    current_num_replicas: int
    target_num_replicas: int = 1
    total_num_requests: float = 0.0
    aggregated_metrics: Mapping[str, Mapping[Any, float]] | None = None
    config: Any = field(default_factory=lambda: SimpleNamespace(get_target_ongoing_requests=lambda: 8.0))


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        # Two replicas, of which one has not told yet: the mean age is 3 s.
        (Context(2, aggregated_metrics={QUEUE_AGE_KEY: {"a": 6.0}}), 3.0),
        (Context(2, aggregated_metrics={QUEUE_AGE_KEY: {"a": 6.0, "b": 2.0}}), 4.0),
        (Context(2, total_num_requests=4.0, aggregated_metrics={"other": {"a": 60.0}}), 0.5),
        (Context(2, total_num_requests=4.0), 0.5),
        # At zero Serve decides.
        (Context(0, target_num_replicas=1), 1.0),
    ],
)
def test_the_policy_reads_what_serve_gives_it(context: Context, expected: float) -> None:
    assert QueueAgePolicy(target_queue_age_s=2.0)(context) == (pytest.approx(expected), {})


def test_serve_gets_the_policy_only_when_it_is_asked_for() -> None:
    def policy(**autoscaling: object) -> Any:
        args = {"name": "vision-cpu", "engine": {}, "autoscaling": {"max_replicas": 2, **autoscaling}}
        config = pool_deployment(parse_pool_settings(args))._deployment_config.autoscaling_config
        assert config.max_replicas == 2
        return config.policy

    assert policy().is_default_policy_function()
    aged = policy(target_queue_age_s=1.5)
    made = aged.get_policy()(**aged.policy_kwargs)
    # 3 s against the target of 1.5 s.
    assert made(Context(1, aggregated_metrics={QUEUE_AGE_KEY: {"a": 3.0}})) == (2.0, {})
    with pytest.raises(InvalidInput, match="target_queue_age_s"):
        policy(target_queue_age_s=0)


async def test_the_age_of_a_queue_is_that_of_its_oldest_item() -> None:
    forward = Forward()
    batcher = Batcher(forward, max_batch=1)
    assert batcher.oldest_wait_s() == 0.0
    forward.gate.clear()
    loop = asyncio.get_running_loop()
    calls = [asyncio.create_task(batcher.submit(0, caller="a"))]
    await until(lambda: forward.batches)
    # The one on the device waits no more.
    assert batcher.oldest_wait_s() == 0.0
    before = loop.time()
    calls.append(asyncio.create_task(batcher.submit(1, caller="a")))
    await until(lambda: batcher.waiting == 1)
    queued = loop.time()
    calls.append(asyncio.create_task(batcher.submit(2, caller="b")))
    await until(lambda: batcher.waiting == 2 and loop.time() > queued + 0.05)
    assert loop.time() - queued <= batcher.oldest_wait_s() <= loop.time() - before
    # Who gave up is not counted.
    calls[1].cancel()
    await until(calls[1].done)
    assert batcher.oldest_wait_s() <= loop.time() - queued
    forward.gate.set()
    await asyncio.gather(*calls, return_exceptions=True)
    assert batcher.oldest_wait_s() == 0.0
    await batcher.close()
