"""EncodeStream: each item of the stream is one unary call to the pool that fits it, answered as soon as it is done.

An item that fails is answered with its own google.rpc.Status and never ends the stream. At most `max_in_flight` items
are under way; then nothing more is read, so a fast client waits. When the router drains, the items that were read are
answered and the stream ends with UNAVAILABLE: what has no answer is to be sent again.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress

import grpc
from google.protobuf.message import DecodeError
from google.rpc import status_pb2

from deployments.router.calls import Call
from deployments.router.envelope import MalformedRequest, StreamItem, read_stream_item
from deployments.router.failures import RouterError
from deployments.router.forward import Forwarder
from deployments.router.gate import Gate, draining
from deployments.router.logs import log_event
from deployments.router.metrics import Metrics
from deployments.router.settings import RouterSettings
from encoder.errors import without_traceback
from encoder.settings import TowerName
from encoder.v1 import encoder_pb2 as pb

logger = logging.getLogger(__name__)
_Code = grpc.StatusCode


class StreamRelay:
    """Serves streams through a Forwarder."""

    def __init__(self, forwarder: Forwarder, gate: Gate, settings: RouterSettings, metrics: Metrics) -> None:
        self._forwarder = forwarder
        self._gate = gate
        self._settings = settings
        self._metrics = metrics

    async def relay(self, context: grpc.aio.ServicerContext, call: Call) -> None:
        """Serves one stream to its end. Raises RouterError when the router drains meanwhile."""
        run = _Stream(context, call, self.answer, self._settings.stream.max_in_flight)
        reader = asyncio.create_task(run.read())
        closing = asyncio.create_task(self._gate.closed.wait())
        try:
            await asyncio.wait({reader, closing}, return_when=asyncio.FIRST_COMPLETED)
            ended = reader.done()
            if ended:
                reader.result()
            else:
                reader.cancel()
            await run.finish()
            if not ended:
                raise draining()
        finally:
            reader.cancel()
            closing.cancel()
            await run.abandon()

    async def answer(self, payload: bytes, call: Call) -> bytes:
        """The EncodeStreamResponse to one EncodeStreamRequest; never raises but for cancellation."""
        item_id, code = "", _Code.OK
        try:
            item = read_stream_item(payload)
            item_id = item.id
            response = await self._encode(item, call)
        except MalformedRequest as error:
            code = _Code.INVALID_ARGUMENT
            response = _failed(item_id, RouterError(code, f"the item cannot be parsed: {error}").status())
        except RouterError as error:
            code = error.code
            response = _failed(item_id, without_traceback(error).status())
        except Exception:
            code = _Code.INTERNAL
            log_event(logger, logging.ERROR, "item_failed", {"request_id": call.request_id}, trace=True)
            response = _failed(item_id, RouterError(code, "the router failed: its log names the cause").status())
        self._metrics.stream_item(code.name)
        return response.SerializeToString()

    async def _encode(self, item: StreamItem, call: Call) -> pb.EncodeStreamResponse:
        if item.tower is None or item.request is None:
            raise RouterError(_Code.INVALID_ARGUMENT, "the message has no item: send an image or a text")
        async with call.quota.turn():
            own = call.for_item(self._settings.deadline.default_s)
            answer = await self._forwarder.send(item.tower, item.request, item.envelope, own)
        call.pool = own.pool
        return _response(item.id, item.tower, answer)


class _Stream:
    """One stream's items under way, at most `max_in_flight`."""

    def __init__(
        self,
        context: grpc.aio.ServicerContext,
        call: Call,
        answer: Callable[[bytes, Call], Awaitable[bytes]],
        max_in_flight: int,
    ) -> None:
        self._context = context
        self._call = call
        self._answer = answer
        self._slots = asyncio.Semaphore(max_in_flight)
        self._items: set[asyncio.Task[None]] = set()
        self._writing = asyncio.Lock()

    async def read(self) -> None:
        """Reads items and starts them, until the client has sent its last."""
        while True:
            await self._slots.acquire()
            payload = await self._context.read()
            if payload is grpc.aio.EOF:
                return
            task = asyncio.create_task(self._serve(payload))
            self._items.add(task)
            task.add_done_callback(self._items.discard)

    async def _serve(self, payload: bytes) -> None:
        try:
            response = await self._answer(payload, self._call)
            self._call.items += 1
            self._call.bytes_in += len(payload)
            self._call.bytes_out += len(response)
            async with self._writing:
                await self._context.write(response)
        except Exception:  # the client has gone; gRPC ends the call, this only keeps the task quiet
            log_event(logger, logging.DEBUG, "answer_not_sent", {"request_id": self._call.request_id}, trace=True)
        finally:
            # Only after the answer was taken: a client that does not read is not read from.
            self._slots.release()

    async def finish(self) -> None:
        """Waits for the items under way."""
        while self._items:
            await asyncio.gather(*self._items)

    async def abandon(self) -> None:
        """Cancels what is still under way, at the pools too."""
        items = list(self._items)
        for task in items:
            task.cancel()
        with suppress(asyncio.CancelledError):
            await asyncio.gather(*items, return_exceptions=True)


def _failed(item_id: str, status: status_pb2.Status) -> pb.EncodeStreamResponse:
    return pb.EncodeStreamResponse(id=item_id, error=status)


def _response(item_id: str, tower: TowerName, answer: bytes) -> pb.EncodeStreamResponse:
    """One item's unary response as a message of the stream; raises RouterError when it holds not just that item."""
    response = pb.EncodeStreamResponse(id=item_id)
    try:
        unary = (
            pb.EncodeTextResponse.FromString(answer) if tower == "text" else pb.EncodeImagesResponse.FromString(answer)
        )
    except DecodeError:
        raise RouterError(_Code.INTERNAL, "the pool's answer cannot be parsed") from None
    outcome = unary.results[0].WhichOneof("outcome") if len(unary.results) == 1 else None
    if outcome is None:
        raise RouterError(_Code.INTERNAL, "the pool did not answer the item")
    result = unary.results[0]
    getattr(response, outcome).CopyFrom(getattr(result, outcome))
    if isinstance(result, pb.TextResult):
        response.token_count, response.truncated = result.token_count, result.truncated
    response.provenance.CopyFrom(unary.provenance)
    response.timings.CopyFrom(unary.timings)
    return response
