"""The batcher on a real event loop and its real thread; forwards are formulas that can be stopped."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from encoder.batching import Batcher
from encoder.errors import DeadlinePassed, EncoderError, InvalidInput, NotReady, Overloaded

REFUSED = 1000


@dataclass
class Result:
    vectors: np.ndarray
    attention_backend: str = "sdpa"
    runner: str = "eager"
    fallback_reason: str | None = None
    tokens: Sequence[np.ndarray] = ()


class Forward:
    """Doubles numbers; waits while `gate` is closed; refuses one number; notes each batch and thread."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.gate.set()
        self.batches: list[list[int]] = []
        self.alone: list[bool] = []
        self.threads: set[threading.Thread] = set()

    def __call__(self, items: Sequence[int], alone: bool) -> Result:
        self.threads.add(threading.current_thread())
        self.batches.append(list(items))
        self.alone.append(alone)
        assert self.gate.wait(10)
        if REFUSED in items:
            raise InvalidInput("this number is refused")
        return Result(np.array([[2.0 * item] for item in items], np.float32))


async def until(condition: object) -> None:
    for _ in range(500):
        if condition():  # type: ignore[operator]
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the condition never held")


async def test_rows_come_back_to_their_own_items() -> None:
    batcher = Batcher(Forward(), max_batch=4)
    rows = await asyncio.gather(*(batcher.submit(i) for i in range(30)))
    assert [row.vector[0] for row in rows] == [2.0 * i for i in range(30)]
    await batcher.close()


async def test_what_waits_goes_together_once_the_device_is_free() -> None:
    forward = Forward()
    forward.gate.clear()
    batcher = Batcher(forward, max_batch=4)
    first = asyncio.create_task(batcher.submit(0))
    await until(lambda: forward.batches == [[0]])
    rest = [asyncio.create_task(batcher.submit(i)) for i in range(1, 7)]
    await until(lambda: batcher.waiting == 6)
    forward.gate.set()
    rows = await asyncio.gather(first, *rest)
    assert forward.batches == [[0], [1, 2, 3, 4], [5, 6]]
    assert [row.batch_size for row in rows] == [1, 4, 4, 4, 4, 2, 2]
    await batcher.close()


async def test_one_thread_runs_every_forward() -> None:
    forward = Forward()
    batcher = Batcher(forward, max_batch=2)
    await asyncio.gather(*(batcher.submit(i) for i in range(20)))
    assert len(forward.threads) == 1 and threading.current_thread() not in forward.threads
    await batcher.close()


async def test_one_bad_item_fails_alone() -> None:
    forward = Forward()
    forward.gate.clear()
    batcher = Batcher(forward, max_batch=8)
    tasks = [asyncio.create_task(batcher.submit(i)) for i in (1, 12, REFUSED, 14)]
    await until(lambda: forward.batches)
    forward.gate.set()
    answers = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(answers[2], InvalidInput)
    assert [row.vector[0] for row in answers if not isinstance(row, BaseException)] == [2.0, 24.0, 28.0]
    await batcher.close()


async def test_cancelled_and_late_items_cost_no_forward() -> None:
    forward = Forward()
    forward.gate.clear()
    batcher = Batcher(forward, max_batch=8)
    running = asyncio.create_task(batcher.submit(0))
    await until(lambda: forward.batches == [[0]])
    gone = asyncio.create_task(batcher.submit(1))
    late = asyncio.create_task(batcher.submit(2, deadline=asyncio.get_running_loop().time() + 0.01))
    kept = asyncio.create_task(batcher.submit(3))
    await until(lambda: batcher.waiting == 3)
    gone.cancel()
    await asyncio.sleep(0.05)
    forward.gate.set()
    with pytest.raises(DeadlinePassed):
        await late
    assert (await kept).vector[0] == 6.0
    assert (await running).vector[0] == 0.0
    assert forward.batches == [[0], [3]]
    await batcher.close()


@pytest.mark.parametrize("gone", [2, REFUSED])
async def test_who_goes_during_a_forward_takes_nobody_along(gone: int) -> None:
    forward = Forward()
    batcher = Batcher(forward, max_batch=4)
    forward.gate.clear()
    first, forward_of_first = asyncio.create_task(batcher.submit(0)), forward.gate
    await until(lambda: forward.batches == [[0]])
    rest = [asyncio.create_task(batcher.submit(item)) for item in (1, gone, 3)]
    await until(lambda: batcher.waiting == 3)
    forward.gate = threading.Event()
    forward_of_first.set()
    await until(lambda: forward.batches[1:] == [[1, gone, 3]])
    rest[1].cancel()
    await asyncio.sleep(0)
    forward.gate.set()
    async with asyncio.timeout(5):
        rows = await asyncio.gather(first, rest[0], rest[2], batcher.submit(4))
    assert [row.vector[0] for row in rows] == [0.0, 2.0, 6.0, 8.0] and rest[1].cancelled()
    assert [gone] not in forward.batches  # nor is it tried again by itself
    await batcher.close()


async def test_who_goes_during_the_forward_that_fails_takes_nobody_along() -> None:
    forward = Forward()
    batcher = Batcher(forward, max_batch=4)
    forward.gate.clear()
    gone = asyncio.create_task(batcher.submit(REFUSED))
    await until(lambda: forward.batches == [[REFUSED]])
    gone.cancel()
    await asyncio.sleep(0)
    forward.gate.set()
    async with asyncio.timeout(5):
        assert (await batcher.submit(4)).vector[0] == 8.0 and gone.cancelled()
    await batcher.close()


async def test_an_error_that_no_future_takes_is_told_as_another() -> None:
    def gives_up(items: Sequence[int], alone: bool) -> Result:
        raise StopIteration

    batcher = Batcher(gives_up, max_batch=4)
    async with asyncio.timeout(5):
        with pytest.raises(EncoderError, match="gave up with StopIteration"):
            await batcher.submit(1)
        await batcher.close()


@pytest.mark.parametrize("lanes", [1, 2])
async def test_a_full_queue_refuses_and_loses_nothing(lanes: int) -> None:
    forward = Forward()
    forward.gate.clear()
    batcher = Batcher(forward, max_batch=1, lanes=lanes, max_waiting=2)
    running = asyncio.create_task(batcher.submit(0))
    await until(lambda: forward.batches == [[0]])
    waiting = [asyncio.create_task(batcher.submit(i)) for i in (1, 2)]
    await until(lambda: batcher.waiting == 2)
    with pytest.raises(Overloaded):
        await batcher.submit(3)
    forward.gate.set()
    rows = await asyncio.gather(running, *waiting)
    assert [row.vector[0] for row in rows] == [0.0, 2.0, 4.0]
    await batcher.close()


async def test_close_refuses_what_waits_and_ends_the_thread() -> None:
    forward = Forward()
    forward.gate.clear()
    batcher = Batcher(forward, max_batch=1)
    running = asyncio.create_task(batcher.submit(0))
    await until(lambda: forward.batches == [[0]])
    waiting = asyncio.create_task(batcher.submit(1))
    await until(lambda: batcher.waiting == 1)
    closing = asyncio.create_task(batcher.close())
    with pytest.raises(NotReady):
        await waiting
    forward.gate.set()
    assert (await running).vector[0] == 0.0
    await closing
    with pytest.raises(NotReady):
        await batcher.submit(5)
    assert not any(thread.is_alive() for thread in forward.threads)


async def test_a_forward_that_loses_a_row_is_an_error() -> None:
    batcher = Batcher(lambda items, alone: Result(np.zeros((0, 1), np.float32)), max_batch=4)
    with pytest.raises(Exception, match="0 vectors for 1 items"):
        await batcher.submit(1)
    await batcher.close()


@pytest.mark.parametrize("lanes", [1, 3])
async def test_call_runs_on_the_thread_of_each_lane(lanes: int) -> None:
    forward = Forward()
    batcher = Batcher(forward, max_batch=1, lanes=lanes)
    await asyncio.gather(*(batcher.submit(i) for i in range(20)))
    called = await batcher.call(threading.current_thread)
    assert len(set(called)) == lanes and set(called) == forward.threads
    await batcher.close()


async def test_a_small_request_is_not_behind_a_big_one() -> None:
    forward = Forward()
    forward.gate.clear()
    batcher = Batcher(forward, max_batch=4)
    big = [asyncio.create_task(batcher.submit(i, caller="big")) for i in range(20)]
    await until(lambda: len(forward.batches) == 1)
    small = asyncio.create_task(batcher.submit(100, caller="small"))
    await until(lambda: batcher.waiting == 17)
    forward.gate.set()
    await asyncio.gather(*big, small)
    assert 100 in forward.batches[1] and [i for batch in forward.batches for i in batch if i < 100] == list(range(20))
    await batcher.close()


async def test_the_plan_says_what_goes_together() -> None:
    """Here: even numbers with even ones. What is left out keeps its place."""
    forward = Forward()
    forward.gate.clear()
    seen: list[list[int]] = []

    def alike(items: Sequence[int]) -> list[int]:
        seen.append(list(items))
        return [place for place, item in enumerate(items) if item % 2 == items[0] % 2]

    batcher = Batcher(forward, max_batch=4, plan=alike)
    first = asyncio.create_task(batcher.submit(0))
    await until(lambda: forward.batches == [[0]])
    rest = [asyncio.create_task(batcher.submit(i)) for i in (1, 2, 3, 4, 5, 6)]
    await until(lambda: batcher.waiting == 6)
    forward.gate.set()
    rows = await asyncio.gather(first, *rest)
    assert forward.batches == [[0], [1, 3], [2, 4, 6], [5]] and seen[1:] == [[1, 2, 3, 4], [2, 4, 5, 6], [5]]
    assert [row.vector[0] for row in rows] == [2.0 * i for i in range(7)]
    await batcher.close()


async def test_a_plan_that_fails_is_logged_and_everything_goes_together(caplog: pytest.LogCaptureFixture) -> None:
    def broken(items: Sequence[int]) -> list[int]:
        raise KeyError("no such length")

    forward = Forward()
    forward.gate.clear()
    batcher = Batcher(forward, max_batch=4, plan=broken)
    first = asyncio.create_task(batcher.submit(0))
    await until(lambda: forward.batches == [[0]])
    rest = [asyncio.create_task(batcher.submit(i)) for i in (1, 2, 3)]
    await until(lambda: batcher.waiting == 3)
    forward.gate.set()
    rows = await asyncio.gather(first, *rest)
    assert [row.vector[0] for row in rows] == [0.0, 2.0, 4.0, 6.0] and forward.batches == [[0], [1, 2, 3]]
    assert {record.getMessage() for record in caplog.records} == {
        "the plan of a batch failed: 1 items go together", "the plan of a batch failed: 3 items go together",
    }  # fmt: skip
    await batcher.close()
