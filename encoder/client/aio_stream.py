"""The asyncio stream: one task reads the caller's items, one the answers; the caller's own task yields."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Iterable

import grpc
import grpc.aio

from encoder.client.aio_status import CallEnding
from encoder.client.errors import ServiceError
from encoder.client.ledger import GOODBYE_SECONDS, CallEnded, Outgoing, SourceEnded, StreamEvent, StreamLedger
from encoder.client.results import StreamResult
from encoder.client.retry import Deadline, Failure
from encoder.client.sources import is_instant
from encoder.v1 import encoder_pb2 as pb

_Outbox = asyncio.Queue[pb.EncodeStreamRequest | None]


async def each(items: Iterable[object] | AsyncIterable[object]) -> AsyncIterator[object]:
    """The items of either kind of iterable."""
    if isinstance(items, AsyncIterable):
        async for item in items:
            yield item
    else:
        for item in items:
            yield item


class AsyncStream:
    """One run of encode_stream."""

    def __init__(
        self,
        method: grpc.aio.StreamStreamMultiCallable,
        metadata: tuple[tuple[str, str], ...],
        ledger: StreamLedger,
        window: int,
        explain: Callable[[Failure, float], ServiceError],
    ) -> None:
        self._method = method
        self._metadata = metadata
        self._ledger = ledger
        self._explain = explain
        self._window = asyncio.Semaphore(window)
        self._deadline = Deadline(ledger.call.timeout)
        self._events: asyncio.Queue[StreamEvent] = asyncio.Queue()
        self._outbox: _Outbox = asyncio.Queue()
        self._call: grpc.aio.StreamStreamCall | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._source_ended = False

    async def results(self, items: Iterable[object] | AsyncIterable[object]) -> AsyncGenerator[StreamResult, None]:
        try:
            self._open_call()
            self._tasks.append(asyncio.create_task(self._read_items(items)))
            while not self._source_ended or len(self._ledger):
                for request in self._ledger.due(time.monotonic()):
                    self._outbox.put_nowait(request)
                result = await self._handle(await self._next_event())
                if result is not None:
                    self._window.release()
                    yield result
            await self._say_goodbye()
        finally:
            await self._stop()

    async def _read_items(self, items: Iterable[object] | AsyncIterable[object]) -> None:
        """In a task: sends the caller's items as the window allows."""
        index = 0
        try:
            async for item in each(items):
                await self._window.acquire()
                prepared = await self._prepare(index, item)
                index += 1
                if isinstance(prepared, StreamResult):
                    self._events.put_nowait(prepared)
                    continue
                self._ledger.admit(prepared)
                self._outbox.put_nowait(prepared.request)
        except Exception as error:  # the caller's own; raised again in the caller's task
            self._events.put_nowait(SourceEnded(error))
        else:
            self._events.put_nowait(SourceEnded())

    async def _prepare(self, index: int, item: object) -> StreamResult | Outgoing:
        if is_instant(self._ledger.call.kind, item):
            return self._ledger.prepare(index, item)
        return await asyncio.to_thread(self._ledger.prepare, index, item)

    def _open_call(self) -> None:
        self._outbox = asyncio.Queue()
        for request in self._ledger.unanswered():
            self._outbox.put_nowait(request)
        requests = self._requests(self._outbox)
        self._call = self._method(requests, timeout=self._deadline.for_grpc(), metadata=self._metadata)
        self._tasks.append(asyncio.create_task(self._read_answers(self._call)))

    @staticmethod
    async def _requests(outbox: _Outbox) -> AsyncIterator[pb.EncodeStreamRequest]:
        while (request := await outbox.get()) is not None:
            yield request

    async def _read_answers(self, call: grpc.aio.StreamStreamCall) -> None:
        """In a task: one call's answers, and how it ended."""
        ending = CallEnding(call)
        try:
            async for response in call:
                self._events.put_nowait(response)
        except grpc.RpcError as error:
            self._events.put_nowait(CallEnded(ending.failure(error)))
        else:
            self._events.put_nowait(CallEnded(Failure.early_end()))

    async def _next_event(self) -> StreamEvent | None:
        seconds = self._ledger.seconds_to_due(time.monotonic())
        try:
            async with asyncio.timeout(None if math.isinf(seconds) else seconds):
                return await self._events.get()
        except TimeoutError:
            return None

    async def _handle(self, event: StreamEvent | None) -> StreamResult | None:
        match event:
            case StreamResult():
                return event
            case pb.EncodeStreamResponse():
                return self._ledger.settle(event, time.monotonic(), self._deadline.remaining())
            case SourceEnded(error):
                self._source_ended = True
                if error is not None:
                    raise error
            case CallEnded(failure):
                await self._reopen(failure)
        return None

    async def _reopen(self, failure: Failure) -> None:
        pause = self._ledger.pause_after(failure, self._deadline.remaining())
        if pause is None:
            raise self._explain(failure, self._ledger.call.timeout)
        # Ends the task in which grpc takes requests of the broken call.
        self._outbox.put_nowait(None)
        await asyncio.sleep(pause)
        self._open_call()

    async def _say_goodbye(self) -> None:
        """Lets the service end its side, so that it does not see a cancelled call."""
        self._outbox.put_nowait(None)
        try:
            async with asyncio.timeout(GOODBYE_SECONDS):
                await self._events.get()
        except TimeoutError:
            return

    async def _stop(self) -> None:
        self._outbox.put_nowait(None)
        if self._call is not None:
            self._call.cancel()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
