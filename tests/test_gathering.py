"""A batcher whose device shares its processors: once idle, it lets what is on its way join a batch."""

import asyncio
from contextlib import ExitStack

import pytest

from encoder.batching import Batcher
from encoder.errors import NotReady
from tests.test_batching import Forward, until
from tests.test_lanes import Held

HOURS = 3600.0
SHORT = 0.05  # longer than the loop needs for all that is ready


def gathering(forward: Forward, *, max_batch: int = 8, item_s: float = HOURS, lanes: int = 1) -> Batcher[int]:
    """One that knows already how long an item takes, which a first forward would tell it."""
    batcher = Batcher(forward, max_batch=max_batch, lanes=lanes, gather=True)
    batcher._item_s = item_s
    return batcher


async def test_an_idle_device_waits_for_what_is_on_its_way() -> None:
    forward = Forward()
    batcher = gathering(forward)
    with batcher.expecting():
        first = asyncio.create_task(batcher.submit(1))
        with batcher.expecting():
            await asyncio.sleep(SHORT)
        assert forward.batches == []  # one of two has come to nothing
        second = asyncio.create_task(batcher.submit(2))
        await asyncio.sleep(SHORT)
        assert forward.batches == []
    assert [(await task).vector[0] for task in (first, second)] == [2.0, 4.0]
    assert forward.batches == [[1, 2]]
    await batcher.close()


async def test_one_that_does_not_gather_waits_for_nothing() -> None:
    forward = Forward()
    batcher = Batcher(forward, max_batch=8)
    batcher._item_s = HOURS
    with batcher.expecting():
        assert (await batcher.submit(1)).batch_size == 1
    await batcher.close()


async def test_with_nothing_on_its_way_an_item_goes_at_once() -> None:
    batcher = gathering(Forward())
    with pytest.raises(RuntimeError), batcher.expecting():
        raise RuntimeError
    assert (await batcher.submit(1)).batch_size == 1
    await batcher.close()


async def test_a_full_batch_does_not_wait() -> None:
    forward = Forward()
    batcher = gathering(forward, max_batch=2)
    with batcher.expecting():
        await asyncio.gather(batcher.submit(1), batcher.submit(2))
    assert forward.batches == [[1, 2]]
    await batcher.close()


async def test_lanes_wait_until_all_of_them_have_all_they_take() -> None:
    forward = Forward()
    batcher = gathering(forward, max_batch=2, lanes=2)
    with batcher.expecting():
        early = [asyncio.create_task(batcher.submit(item)) for item in (1, 2, 3)]
        await asyncio.sleep(SHORT)
        assert forward.batches == []
        await asyncio.gather(batcher.submit(4), *early)
    assert sorted(forward.batches) == [[1, 2], [3, 4]]
    await batcher.close()


async def test_a_free_lane_waits_beside_a_busy_one() -> None:
    forward = Held(1)
    batcher = gathering(forward, max_batch=2, lanes=2)
    first, second = (asyncio.create_task(batcher.submit(item)) for item in (1, 2))  # each on a lane of its own
    await second
    batcher._item_s = HOURS
    with batcher.expecting():
        third = asyncio.create_task(batcher.submit(3))
        await asyncio.sleep(SHORT)
        assert sorted(forward.batches) == [[1], [2]]
        await asyncio.gather(third, batcher.submit(4))  # two are all that a lane takes
    assert forward.batches[2:] == [[3, 4]]
    forward.held[1].set()
    await first
    await batcher.close()


async def test_after_a_forward_what_waits_goes_on_at_once() -> None:
    forward = Forward()
    forward.gate.clear()
    batcher = gathering(forward)
    first = asyncio.create_task(batcher.submit(1))
    await until(lambda: forward.batches == [[1]])
    second = asyncio.create_task(batcher.submit(2))
    await until(lambda: batcher.waiting == 1)
    batcher._item_s = HOURS
    with batcher.expecting():
        forward.gate.set()
        await asyncio.gather(first, second)
    assert forward.batches == [[1], [2]]
    await batcher.close()


async def test_nobody_waits_longer_than_a_forward_takes() -> None:
    forward = Forward()
    batcher = gathering(forward, item_s=0.0)
    forward.gate.clear()
    first = asyncio.create_task(batcher.submit(1))
    await until(lambda: forward.batches)
    await asyncio.sleep(SHORT)
    forward.gate.set()
    took_s = (await first).forward_ms / 1e3
    assert SHORT <= took_s == pytest.approx(batcher._item_s)
    loop = asyncio.get_running_loop()
    with batcher.expecting():  # and never comes
        began = loop.time()
        assert (await batcher.submit(2)).batch_size == 1
        assert loop.time() - began >= took_s
    await batcher.close()


async def test_what_has_been_on_its_way_for_long_is_not_waited_for() -> None:
    forward = Forward()
    batcher = gathering(forward)
    with batcher.expecting():
        for coming in batcher._expected:
            batcher._expected[coming] -= 2 * HOURS
        assert (await batcher.submit(1)).batch_size == 1
        batcher._item_s = HOURS
        with batcher.expecting():  # a younger one is
            task = asyncio.create_task(batcher.submit(2))
            await asyncio.sleep(SHORT)
            assert forward.batches == [[1]]
            assert (await asyncio.gather(task, *(batcher.submit(item) for item in range(3, 10))))[0].batch_size == 8
    await batcher.close()


async def test_what_waits_together_is_worth_waiting_for_together() -> None:
    forward = Forward()
    batcher = gathering(forward)
    with batcher.expecting():
        for coming in batcher._expected:
            batcher._expected[coming] -= 1.5 * HOURS  # too long for one, and not for two
        pair = [asyncio.create_task(batcher.submit(item)) for item in (1, 2)]
        await asyncio.sleep(SHORT)
        assert forward.batches == []
    await asyncio.gather(*pair)
    await batcher.close()


async def test_however_many_come_the_wait_ends() -> None:
    """One after the other comes to nothing, each younger than the one before, and there is always one on its way."""
    batcher = gathering(Forward(), item_s=SHORT)
    on_its_way = ExitStack()
    on_its_way.enter_context(batcher.expecting())
    answer = asyncio.create_task(batcher.submit(1))
    async with asyncio.timeout(10):
        while not answer.done():
            await asyncio.sleep(SHORT / 10)
            younger = ExitStack()
            younger.enter_context(batcher.expecting())
            on_its_way.close()
            on_its_way = younger
    assert (await answer).batch_size == 1
    on_its_way.close()
    await batcher.close()


async def test_an_item_s_time_is_that_of_its_share() -> None:
    forward = Forward()
    batcher = gathering(forward)
    rows = await asyncio.gather(*(batcher.submit(item) for item in range(4)))
    assert rows[0].batch_size == 4 and batcher._item_s == pytest.approx(rows[0].forward_ms / 4e3)
    await batcher.close()


async def test_close_refuses_what_gathers() -> None:
    forward = Forward()
    batcher = gathering(forward)
    with ExitStack() as on_their_way:
        on_their_way.enter_context(batcher.expecting())
        task = asyncio.create_task(batcher.submit(1))
        await until(lambda: batcher.waiting == 1)
        await asyncio.sleep(SHORT)
        async with asyncio.timeout(10):
            await batcher.close()
        with pytest.raises(NotReady):
            await task
    assert forward.batches == []


async def test_who_goes_while_gathering_costs_no_forward() -> None:
    forward = Forward()
    batcher = gathering(forward)
    with batcher.expecting():
        gone = asyncio.create_task(batcher.submit(1))
        kept = asyncio.create_task(batcher.submit(2))
        await asyncio.sleep(SHORT)
        gone.cancel()
    assert (await kept).vector[0] == 4.0
    assert forward.batches == [[2]]
    await batcher.close()
