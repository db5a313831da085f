"""A device that takes batches ahead: a full one is given while another is computed, a smaller one waits for more."""

import asyncio

import pytest

from encoder.batching import Batcher
from encoder.errors import NotReady
from tests.test_batching import Forward, until
from tests.test_lanes import Held, alive, waiting_for


async def test_a_full_batch_is_given_ahead_and_a_smaller_one_is_not() -> None:
    forward = Held(0)
    batcher = Batcher(forward, max_batch=4, ahead=True)
    first = await busy_with(batcher, forward)
    some = waiting_for(batcher, range(1, 4))
    await until(lambda: batcher.waiting == 3)
    await asyncio.sleep(0.05)
    assert forward.batches == [[0]]
    more = waiting_for(batcher, range(4, 6))
    await until(lambda: len(forward.batches) == 2)
    rows = await asyncio.gather(*some, more[0])
    assert forward.batches == [[0], [1, 2, 3, 4]] and batcher.waiting == 1
    assert [row.vector[0] for row in rows] == [2.0, 4.0, 6.0, 8.0]  # type: ignore[attr-defined]
    forward.held[0].set()
    rows = await asyncio.gather(first, more[1])
    assert [row.vector[0] for row in rows] == [0.0, 10.0]  # type: ignore[attr-defined]
    assert forward.batches[2:] == [[5]]
    await batcher.close()


async def test_whoever_is_given_ahead_is_told_that_it_is_not_alone() -> None:
    forward = Held(0)
    batcher = Batcher(forward, max_batch=2, ahead=True)
    first = await busy_with(batcher, forward)
    await asyncio.gather(*waiting_for(batcher, range(1, 3)))
    forward.held[0].set()
    await first
    await batcher.submit(3)
    await asyncio.gather(*waiting_for(batcher, range(4, 6)))
    assert forward.batches == [[0], [1, 2], [3], [4, 5]] and forward.alone == [True, False, True, True]
    await batcher.close()


async def test_no_more_than_one_is_given_ahead() -> None:
    forward = Held(0, 1)
    batcher = Batcher(forward, max_batch=1, ahead=True)
    tasks = waiting_for(batcher, range(4))
    await until(lambda: len(forward.batches) == 2)
    await asyncio.sleep(0.05)
    assert forward.batches == [[0], [1]] and batcher.waiting == 2
    forward.held[0].set()
    forward.held[1].set()
    rows = await asyncio.gather(*tasks)
    assert [row.vector[0] for row in rows] == [0.0, 2.0, 4.0, 6.0]  # type: ignore[attr-defined]
    await batcher.close()


async def test_a_batch_behind_one_that_is_stuck_shows_how_long_it_is() -> None:
    forward = Held(0)
    batcher = Batcher(forward, max_batch=4, ahead=True)
    first = await busy_with(batcher, forward)
    await asyncio.sleep(0.05)
    await asyncio.gather(*waiting_for(batcher, range(1, 5)))
    assert batcher.longest_forward_s() >= 0.05
    forward.held[0].set()
    await first
    assert batcher.longest_forward_s() == 0.0
    await batcher.close()


async def test_close_lets_both_end() -> None:
    forward = Forward()
    batcher = Batcher(forward, max_batch=1, ahead=True)
    forward.gate.clear()
    tasks = waiting_for(batcher, range(3))
    await until(lambda: len(forward.batches) == 2 and batcher.waiting == 1)
    closing = asyncio.create_task(batcher.close())
    with pytest.raises(NotReady):
        await tasks[2]
    forward.gate.set()
    assert [row.vector[0] for row in await asyncio.gather(*tasks[:2])] == [0.0, 2.0]  # type: ignore[attr-defined]
    await closing
    assert len(forward.threads) == 2 and not alive(forward)


def test_lanes_take_nothing_ahead() -> None:
    with pytest.raises(ValueError, match="a device of 2 lanes takes nothing ahead"):
        Batcher(Forward(), max_batch=1, lanes=2, ahead=True)


async def busy_with(batcher: Batcher[int], forward: Held) -> "asyncio.Task[object]":
    """Item 0 under way, its forward held."""
    task = asyncio.create_task(batcher.submit(0))
    await until(lambda: forward.batches == [[0]])
    return task
