"""The asyncio client."""

# ruff: noqa: ASYNC109 - the timeout is of each request and goes to the service too; asyncio.timeout could not do that.

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, AsyncIterable, Iterable
from types import TracebackType
from typing import Any, Literal, overload

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from encoder.client.aio_stream import AsyncStream, each
from encoder.client.base import HEALTH_TIMEOUT, ClientBase, OnError
from encoder.client.errors import ItemError, ServiceError
from encoder.client.features import Features
from encoder.client.formats import Dtype
from encoder.client.job import EncodeJob
from encoder.client.request import Batch, Output, Overflow, Progress, Wanted
from encoder.client.results import Block, EncodeResult, StreamResult, VectorArray
from encoder.client.retry import Deadline, Failure
from encoder.client.sources import ImageInput, Kind, Source, is_instant
from encoder.v1 import encoder_pb2 as pb
from encoder.v1 import encoder_pb2_grpc


class AsyncEncoderClient(ClientBase):
    """EncoderClient as coroutines, for one event loop; an async context manager.

    All calls raise ServiceError for what concerns the whole call. The settings are described at ClientBase.__init__.
    Where EncoderClient takes an iterable, an async iterable will do as well. Files and PIL images are read in threads,
    so that the loop never waits for a disk.
    """

    _channel: grpc.aio.Channel | None = None

    async def __aenter__(self) -> AsyncEncoderClient:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Closes the channel; calls in flight end. The client cannot be used again."""
        self._closed = True
        if self._channel is not None:
            await self._channel.close()

    @overload
    async def encode_images(
        self,
        images: Iterable[ImageInput] | AsyncIterable[ImageInput],
        *,
        dtype: Dtype = ...,
        dimensions: int = ...,
        normalize: bool | None = ...,
        pool: str = ...,
        output: Literal["pooled"] = ...,
        on_error: Literal["raise"] = ...,
        timeout: float | None = ...,
        progress: Progress | None = ...,
    ) -> VectorArray: ...

    @overload
    async def encode_images(
        self,
        images: Iterable[ImageInput] | AsyncIterable[ImageInput],
        *,
        dtype: Dtype = ...,
        dimensions: int = ...,
        normalize: bool | None = ...,
        pool: str = ...,
        output: Literal["tokens"],
        on_error: Literal["raise"] = ...,
        timeout: float | None = ...,
        progress: Progress | None = ...,
    ) -> list[Features]: ...

    @overload
    async def encode_images(
        self,
        images: Iterable[ImageInput] | AsyncIterable[ImageInput],
        *,
        dtype: Dtype = ...,
        dimensions: int = ...,
        normalize: bool | None = ...,
        pool: str = ...,
        output: Output = ...,
        on_error: Literal["mask"],
        timeout: float | None = ...,
        progress: Progress | None = ...,
    ) -> EncodeResult: ...

    async def encode_images(
        self,
        images: Iterable[ImageInput] | AsyncIterable[ImageInput],
        *,
        dtype: Dtype = "float32",
        dimensions: int = 0,
        normalize: bool | None = None,
        pool: str = "",
        output: Output = "pooled",
        on_error: OnError = "raise",
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> VectorArray | list[Features] | EncodeResult:
        """Vectors of images, in their order; see EncoderClient.encode_images."""
        wanted = Wanted(dtype, dimensions, normalize, pool, output=output)
        result = await self._encode(images, self._job("image", images, wanted, on_error, timeout, progress))
        if on_error == "mask":
            return result
        return result.raise_for_errors() if output == "pooled" else result.raise_or_features()

    @overload
    async def encode_text(
        self,
        texts: Iterable[str] | AsyncIterable[str],
        *,
        dtype: Dtype = ...,
        dimensions: int = ...,
        normalize: bool | None = ...,
        pool: str = ...,
        overflow: Overflow = ...,
        on_error: Literal["raise"] = ...,
        timeout: float | None = ...,
        progress: Progress | None = ...,
    ) -> VectorArray: ...

    @overload
    async def encode_text(
        self,
        texts: Iterable[str] | AsyncIterable[str],
        *,
        dtype: Dtype = ...,
        dimensions: int = ...,
        normalize: bool | None = ...,
        pool: str = ...,
        overflow: Overflow = ...,
        on_error: Literal["mask"],
        timeout: float | None = ...,
        progress: Progress | None = ...,
    ) -> EncodeResult: ...

    async def encode_text(
        self,
        texts: Iterable[str] | AsyncIterable[str],
        *,
        dtype: Dtype = "float32",
        dimensions: int = 0,
        normalize: bool | None = None,
        pool: str = "",
        overflow: Overflow = "truncate",
        on_error: OnError = "raise",
        timeout: float | None = None,
        progress: Progress | None = None,
    ) -> VectorArray | EncodeResult:
        """Vectors of texts, in their order; see EncoderClient.encode_text."""
        wanted = Wanted(dtype, dimensions, normalize, pool, overflow)
        result = await self._encode(texts, self._job("text", texts, wanted, on_error, timeout, progress))
        return result if on_error == "mask" else result.raise_for_errors()

    def encode_stream(
        self,
        items: Iterable[ImageInput | str | tuple[str, ImageInput | str]]
        | AsyncIterable[ImageInput | str | tuple[str, ImageInput | str]],
        *,
        kind: Kind = "image",
        dtype: Dtype = "float32",
        dimensions: int = 0,
        normalize: bool | None = None,
        pool: str = "",
        overflow: Overflow = "truncate",
        output: Output = "pooled",
        window: int = 64,
        timeout: float | None = None,
    ) -> AsyncGenerator[StreamResult, None]:
        """Yields one StreamResult for each item as soon as it is done; see EncoderClient.encode_stream.

        The items are read in a task of their own. To stop early, wrap it in contextlib.aclosing.
        """
        wanted = Wanted(dtype, dimensions, normalize, pool, overflow, output)
        ledger = self._ledger(kind, items, wanted, window, timeout)
        return AsyncStream(self._open().EncodeStream, self._metadata, ledger, window, self._error).results(items)

    async def list_models(self) -> tuple[pb.Model, ...]:
        """The models that are served, as `encoder.v1.Model` messages."""
        response, _ = await self._unary(self._open().ListModels, pb.ListModelsRequest(), self._timeout)
        return tuple(response.models)

    async def get_model(self, name: str = "") -> pb.Model:
        """One model as an `encoder.v1.Model` message; an empty name means the client's model or else the default."""
        request = pb.GetModelRequest(model=name or self.model)
        response, _ = await self._unary(self._open().GetModel, request, self._timeout)
        return response.model

    async def backend_report(self, pool: str = "") -> pb.GetBackendReportResponse:
        """What each replica chose and proved, as an `encoder.v1.GetBackendReportResponse`; empty: of all pools."""
        request = pb.GetBackendReportRequest(pool=pool)
        response, _ = await self._unary(self._open().GetBackendReport, request, self._timeout)
        return response

    async def healthy(self, service: str = "", *, timeout: float = HEALTH_TIMEOUT) -> bool:
        """Whether the service says by grpc.health.v1 that it serves; see EncoderClient.healthy."""
        stub = health_pb2_grpc.HealthStub(self._open_channel())
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = await stub.Check(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            return self._unhealthy(Failure.of_call(error), timeout)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _open_channel(self) -> grpc.aio.Channel:
        # Not in the constructor: the channel belongs to the loop in which it is made.
        self._check_open()
        if self._channel is None:
            to, options = self._connection, self._connection.channel_options()
            self._channel = (
                grpc.aio.secure_channel(to.address, to.credentials(), options)
                if to.secure
                else grpc.aio.insecure_channel(to.address, options)
            )
        return self._channel

    def _open(self) -> encoder_pb2_grpc.EncoderServiceStub:
        return encoder_pb2_grpc.EncoderServiceStub(self._open_channel())

    async def _encode(self, items: Iterable[object] | AsyncIterable[object], job: EncodeJob) -> EncodeResult:
        stub = self._open()
        pending: set[asyncio.Task[Block]] = set()

        async def submit(batch: Batch | None) -> None:
            if batch is not None:
                await settle(self._concurrency - 1)
                pending.add(asyncio.create_task(self._send(stub, batch)))

        async def settle(left: int) -> None:
            while len(pending) > left:
                done, _ = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    pending.remove(task)
                    job.settle(task.result())

        try:
            async for item in each(items):
                await submit(job.place(await self._source(job, item)))
            await submit(job.flush())
            await settle(0)
        except ServiceError as failure:
            raise job.abandon(failure) from None
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)
        job.tell()
        return job.result()

    async def _source(self, job: EncodeJob, item: object) -> Source | ItemError:
        index = job.take()
        if is_instant(job.call.kind, item):
            return job.call.source(index, item)
        return await asyncio.to_thread(job.call.source, index, item)

    async def _send(self, stub: encoder_pb2_grpc.EncoderServiceStub, batch: Batch) -> Block:
        loaded = await asyncio.to_thread(batch.load)
        if loaded.request is None:
            return batch.unsent(loaded)
        method = stub.EncodeText if batch.call.kind == "text" else stub.EncodeImages
        response, attempts = await self._unary(method, loaded.request, batch.call.timeout)
        return batch.decode(loaded, response, attempts)

    async def _unary(
        self, method: grpc.aio.UnaryUnaryMultiCallable, request: object, timeout: float
    ) -> tuple[Any, int]:
        """The response of a call with its retries, and how often it was sent."""
        deadline = Deadline(timeout)
        attempt = 1
        while True:
            try:
                return await method(request, timeout=deadline.for_grpc(), metadata=self._metadata), attempt
            except grpc.RpcError as error:
                failure = Failure.of_call(error)
            pause = self._retry.pause(failure, attempt, deadline.remaining())
            if pause is None:
                raise self._error(failure, timeout)
            await asyncio.sleep(pause)
            attempt += 1
