"""What only the asyncio client has: async sources, cancellation, a loop that is never blocked."""

import asyncio
import os
import queue
import threading
from contextlib import aclosing

import numpy as np
import pytest

from encoder.client import AsyncEncoderClient, ServiceError
from tests.client.formula import expected, expected_rows


async def as_they_come(items):
    for item in items:
        await asyncio.sleep(0)
        yield item


async def only(tasks):
    """Returns when no task but these is left; grpc's own take a moment after a call was cancelled."""
    for _ in range(500):
        if asyncio.all_tasks() == tasks:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(asyncio.all_tasks() - tasks)


async def test_async_sources(running, tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(b"file")
    async with AsyncEncoderClient(running.address, batch_size=2) as client:
        told = []
        vectors = await client.encode_images(as_they_come([b"x", path, b"z"]), progress=lambda *news: told.append(news))
        np.testing.assert_array_equal(vectors, expected_rows([b"x", b"file", b"z"]))
        assert told[-1] == (3, None)
        np.testing.assert_array_equal(await client.encode_text(as_they_come(["a"])), expected_rows(["a"]))
        streamed = {result.index: result async for result in client.encode_stream(as_they_come([b"x", ("id", path)]))}
        np.testing.assert_array_equal(streamed[1].vector, expected(b"file"))
        assert streamed[1].id == "id"


async def test_files_are_looked_at_in_threads(running, tmp_path):
    path, threads = tmp_path / "a.jpg", set()
    path.write_bytes(b"file")

    class Watched(os.PathLike):
        def __fspath__(self):
            threads.add(threading.current_thread())
            return str(path)

    async with AsyncEncoderClient(running.address) as client:
        np.testing.assert_array_equal(await client.encode_images([Watched()]), expected_rows([b"file"]))
        assert threads and threading.current_thread() not in threads
        threads.clear()
        assert [result.ok async for result in client.encode_stream([Watched()])] == [True]
        assert threads and threading.current_thread() not in threads


async def test_calls_overlap(running, service):
    together = threading.Barrier(2)
    service.before_answer = lambda request, context: together.wait(10)
    async with AsyncEncoderClient(running.address) as client:
        first, second = await asyncio.gather(client.encode_images([b"x"]), client.encode_text(["y"]))
    np.testing.assert_array_equal(np.concatenate([first, second]), expected_rows([b"x", b"y"]))


async def test_cancelling_ends_the_calls(running, service):
    arrived, ended, told_in_time = threading.Event(), threading.Event(), queue.Queue()

    def wait_for_the_end(request, context):
        context.add_callback(ended.set)
        arrived.set()
        told_in_time.put(ended.wait(8))

    service.before_answer = wait_for_the_end
    async with AsyncEncoderClient(running.address) as client:
        call = asyncio.create_task(client.encode_images([b"x"]))
        assert await asyncio.to_thread(arrived.wait, 10)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert await asyncio.to_thread(told_in_time.get, timeout=10)


async def test_a_slow_source_does_not_hold_results_back(running):
    first_seen = asyncio.Event()

    async def items():
        yield b"x"
        await asyncio.wait_for(first_seen.wait(), 10)
        yield b"y"

    seen = []
    async with AsyncEncoderClient(running.address) as client:
        async for result in client.encode_stream(items()):
            seen.append(result.index)
            first_seen.set()
    assert seen == [0, 1]


async def test_a_stream_left_early_leaves_no_task(running):
    before = asyncio.all_tasks()
    client = AsyncEncoderClient(running.address)
    async with aclosing(client.encode_stream([b"x", b"y", b"z"] * 50, window=4)) as stream:
        async for result in stream:
            assert result.ok
            break
    await client.close()
    await only(before)


async def test_a_failed_call_leaves_no_task(running, service):
    before = asyncio.all_tasks()
    service.before_answer = lambda request, context: context.abort(3, "no") if len(request.images) == 1 else None
    async with AsyncEncoderClient(running.address, batch_size=2) as client:
        with pytest.raises(ServiceError):
            await client.encode_images([b"x"] * 5)
    await only(before)


async def test_closed(running):
    async with AsyncEncoderClient(running.address) as client:
        assert await client.healthy()
    with pytest.raises(RuntimeError, match="AsyncEncoderClient is closed"):
        await client.encode_images([b"x"])
