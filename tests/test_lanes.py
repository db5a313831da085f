"""A device with lanes: who gets the whole of it, how what waits is shared out, and that no lane waits for another."""

import asyncio
import threading
from collections.abc import Sequence

import pytest

from encoder.batching import Batcher
from encoder.errors import InvalidInput, NotReady
from tests.test_batching import REFUSED, Forward, Result, until


class Held(Forward):
    """The forward of each of these items waits until its event is set."""

    def __init__(self, *items: int) -> None:
        super().__init__()
        self.held = {item: threading.Event() for item in items}

    def __call__(self, items: Sequence[int], alone: bool) -> Result:
        result = super().__call__(items, alone)
        assert all(self.held[item].wait(10) for item in items if item in self.held)
        return result


async def busy(batcher: Batcher[int], forward: Forward, item: int) -> "asyncio.Task[object]":
    """`item` under way, its forward stopped at the gate."""
    forward.gate.clear()
    task = asyncio.create_task(batcher.submit(item))
    await until(lambda: [item] in forward.batches)
    return task


def waiting_for(batcher: Batcher[int], items: range) -> "list[asyncio.Task[object]]":
    return [asyncio.create_task(batcher.submit(item)) for item in items]


async def test_a_lone_item_has_the_whole_device_and_nothing_runs_beside_it() -> None:
    forward = Forward()
    batcher = Batcher(forward, max_batch=4, lanes=2)
    first = await busy(batcher, forward, 0)
    rest = waiting_for(batcher, range(1, 4))
    await until(lambda: batcher.waiting == 3)
    await asyncio.sleep(0.05)
    assert forward.batches == [[0]] and forward.alone == [True]
    forward.gate.set()
    rows = await asyncio.gather(first, *rest)
    assert [row.vector[0] for row in rows] == [0.0, 2.0, 4.0, 6.0]  # type: ignore[attr-defined]
    await batcher.close()


async def test_what_waits_is_shared_out_among_the_lanes() -> None:
    forward = Forward()
    batcher = Batcher(forward, max_batch=4, lanes=2)
    first = await busy(batcher, forward, 0)
    rest = waiting_for(batcher, range(1, 7))
    await until(lambda: batcher.waiting == 6)
    stopped = forward.gate
    forward.gate = type(stopped)()  # the next forwards stop at a gate of their own, which shows them side by side
    stopped.set()
    await until(lambda: len(forward.batches) == 3)
    assert sorted(forward.batches[1:]) == [[1, 2, 3], [4, 5, 6]] and forward.alone == [True, False, False]
    assert len(forward.threads) == 2
    forward.gate.set()
    await asyncio.gather(first, *rest)
    await batcher.close()


async def test_more_than_the_lanes_take_goes_in_turns() -> None:
    forward = Forward()
    batcher = Batcher(forward, max_batch=4, lanes=2)
    first = await busy(batcher, forward, 0)
    rest = waiting_for(batcher, range(1, 12))
    await until(lambda: batcher.waiting == 11)
    forward.gate.set()
    rows = await asyncio.gather(first, *rest)
    assert [row.vector[0] for row in rows] == [2.0 * item for item in range(12)]  # type: ignore[attr-defined]
    assert sorted(map(len, forward.batches)) == [1, 3, 4, 4]
    await batcher.close()


async def test_a_free_lane_takes_what_comes_while_another_is_busy() -> None:
    forward = Forward()
    batcher = Batcher(forward, max_batch=4, lanes=2)
    forward.gate.clear()
    pair = [asyncio.create_task(batcher.submit(item)) for item in (0, 1)]
    await until(lambda: len(forward.batches) == 2)
    third = asyncio.create_task(batcher.submit(2))
    await until(lambda: batcher.waiting == 1)
    stuck, forward.gate = forward.gate, type(forward.gate)()
    forward.gate.set()
    stuck.set()
    await asyncio.gather(*pair, third)
    assert forward.batches == [[0], [1], [2]] and forward.alone[:2] == [False, False]
    await batcher.close()


async def test_a_lane_that_is_stuck_leaves_the_other_at_work_and_shows() -> None:
    forward = Forward()
    batcher = Batcher(forward, max_batch=1, lanes=2)
    assert batcher.longest_forward_s() == 0.0
    stuck = forward.gate
    stuck.clear()
    pair = [asyncio.create_task(batcher.submit(item)) for item in (0, 1)]
    await until(lambda: len(forward.batches) == 2)
    await asyncio.sleep(0.05)
    assert batcher.longest_forward_s() >= 0.05
    stuck.set()
    await asyncio.gather(*pair)
    assert batcher.longest_forward_s() == 0.0

    forward.gate.clear()
    first, forward.gate = forward.gate, type(stuck)()
    forward.gate.set()
    waiting = [asyncio.create_task(batcher.submit(item)) for item in (2, 3)]
    await asyncio.gather(*waiting)
    first.set()
    assert sorted(forward.batches[2:]) == [[2], [3]]
    await batcher.close()


async def test_the_one_that_is_stuck_shows_beside_a_younger_one() -> None:
    forward = Held(0, 1, 2)
    batcher = Batcher(forward, max_batch=1, lanes=2)
    tasks = waiting_for(batcher, range(3))
    await until(lambda: len(forward.batches) == 2)
    await asyncio.sleep(0.1)
    forward.held[1].set()
    await until(lambda: len(forward.batches) == 3)
    assert batcher.longest_forward_s() >= 0.1 and forward.alone == [False, False, False]
    forward.held[0].set()
    forward.held[2].set()
    await asyncio.gather(*tasks)
    await batcher.close()


async def test_one_bad_item_of_a_lane_fails_alone() -> None:
    forward = Forward()
    batcher = Batcher(forward, max_batch=4, lanes=2)
    first = await busy(batcher, forward, 0)
    rest = [asyncio.create_task(batcher.submit(item)) for item in (1, REFUSED, 3, 4, 5, 6)]
    await until(lambda: batcher.waiting == 6)
    forward.gate.set()
    answers = await asyncio.gather(first, *rest, return_exceptions=True)
    assert isinstance(answers[2], InvalidInput)
    good = [answer.vector[0] for answer in answers if not isinstance(answer, BaseException)]
    assert good == [0.0, 2.0, 6.0, 8.0, 10.0, 12.0]
    await batcher.close()


async def test_close_lets_every_lane_end() -> None:
    forward = Forward()
    batcher = Batcher(forward, max_batch=1, lanes=2)
    forward.gate.clear()
    tasks = [asyncio.create_task(batcher.submit(item)) for item in range(3)]
    await until(lambda: len(forward.batches) == 2 and batcher.waiting == 1)
    closing = asyncio.create_task(batcher.close())
    with pytest.raises(NotReady):
        await tasks[2]
    forward.gate.set()
    assert [(await task).vector[0] for task in tasks[:2]] == [0.0, 2.0]
    await closing
    assert len(forward.threads) == 2 and not alive(forward)


async def test_close_that_is_given_up_leaves_the_stuck_thread_and_nobody_waiting() -> None:
    forward = Held(0)
    batcher = Batcher(forward, max_batch=1, lanes=2)
    stuck, done = waiting_for(batcher, range(2))
    await done
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(batcher.close(), 0.1)
    with pytest.raises(NotReady):
        await asyncio.wait_for(stuck, 5)
    await until(lambda: len(alive(forward)) == 1)
    forward.held[0].set()
    await until(lambda: not alive(forward))


def alive(forward: Forward) -> set[threading.Thread]:
    """Threads that ran forwards and are there still; an identifier would not do, a later thread may have it again."""
    return {thread for thread in forward.threads if thread.is_alive()}


def test_sizes_are_checked() -> None:
    for wrong in ({"max_batch": 0}, {"max_batch": 1, "lanes": 0}, {"max_batch": 1, "max_waiting": 0}):
        with pytest.raises(ValueError, match="at least 1"):
            Batcher(Forward(), **wrong)
