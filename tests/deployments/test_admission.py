"""Room: what is refused, what waits, and that room comes back whatever happens."""

import asyncio
from contextlib import AsyncExitStack

import pytest

from deployments.admission import Room
from encoder.errors import Overloaded


async def test_a_unary_call_takes_its_room_or_fails_at_once():
    room = Room(max_items=10, max_bytes=100)
    with room.hold(6, 10):
        assert (room.items, room.bytes) == (6, 10)
        words = r"6 items \(10 bytes\) are under way and 5 more do not fit into 10 items and 100 bytes"
        with pytest.raises(Overloaded, match=words), room.hold(5, 1):
            pass
        with pytest.raises(Overloaded), room.hold(1, 91):
            pass
        with room.hold(4, 90):
            assert (room.items, room.bytes) == (10, 100)
    assert (room.items, room.bytes) == (0, 0)


async def test_room_comes_back_after_an_error():
    room = Room(4, 100)
    with pytest.raises(ZeroDivisionError), room.hold(4, 100):
        raise ZeroDivisionError
    async with room.hold_when_free(4, 100):
        assert room.items == 4
    assert (room.items, room.bytes) == (0, 0)


async def test_stream_items_wait_their_turn():
    room = Room(2, 100)
    order: list[str] = []

    async def enter(name: str, items: int) -> None:
        async with room.hold_when_free(items, 1):
            order.append(name)
            await asyncio.sleep(0)

    with room.hold(2, 2):
        tasks = [asyncio.create_task(enter("two", 2)), asyncio.create_task(enter("one", 1))]
        await asyncio.sleep(0.01)
        assert order == []
    await asyncio.gather(*tasks)
    assert order == ["two", "one"]
    assert (room.items, room.bytes) == (0, 0)


async def test_a_waiter_that_gives_up_leaves_no_trace():
    room = Room(2, 100)
    async with AsyncExitStack() as stack:
        stack.enter_context(room.hold(2, 2))
        gone = asyncio.create_task(_enter(room, 2))
        stays = asyncio.create_task(_enter(room, 1))
        await asyncio.sleep(0)
        gone.cancel()
        with pytest.raises(asyncio.CancelledError):
            await gone
        assert not stays.done()
    await asyncio.wait_for(stays, 1)
    assert (room.items, room.bytes) == (0, 0)


async def test_a_waiter_cancelled_in_the_turn_it_is_admitted_gives_its_room_back():
    room = Room(2, 100)
    with room.hold(2, 2):
        waiter = asyncio.create_task(_enter(room, 2))
        await asyncio.sleep(0)
    waiter.cancel()  # room was just given to it, and it has not run since
    with pytest.raises(asyncio.CancelledError):
        await waiter
    assert (room.items, room.bytes) == (0, 0)


async def test_a_waiter_cancelled_before_it_ran_does_not_stop_the_next():
    room = Room(2, 100)
    with room.hold(2, 2):
        gone, stays = asyncio.create_task(_enter(room, 2)), asyncio.create_task(_enter(room, 2))
        await asyncio.sleep(0)
        gone.cancel()  # still queued when the room comes back
    await asyncio.wait_for(stays, 1)
    assert (room.items, room.bytes) == (0, 0)


async def test_something_larger_than_the_room_gets_through_alone():
    room = Room(2, 10)
    with room.hold(3, 1000):
        assert room.items == 3
    await asyncio.wait_for(_enter(room, 5), 1)
    assert room.items == 0


async def _enter(room: Room, items: int) -> None:
    async with room.hold_when_free(items, items):
        pass
