"""The blocking client."""

from __future__ import annotations

from collections.abc import Generator, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from functools import partial
from types import TracebackType
from typing import Any, Literal, overload

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from encoder.client.base import HEALTH_TIMEOUT, ClientBase, OnError
from encoder.client.blocking_stream import BlockingStream
from encoder.client.calls import CallGroup
from encoder.client.errors import ServiceError
from encoder.client.features import Features
from encoder.client.formats import Dtype
from encoder.client.job import EncodeJob
from encoder.client.request import Batch, Output, Overflow, Progress, Wanted
from encoder.client.results import Block, EncodeResult, StreamResult, VectorArray
from encoder.client.retry import Deadline, Failure
from encoder.client.sources import ImageInput, Kind
from encoder.v1 import encoder_pb2 as pb
from encoder.v1 import encoder_pb2_grpc


class EncoderClient(ClientBase):
    """A vitfleet service over one gRPC channel. Safe to share between threads; a context manager.

    All calls raise ServiceError for what concerns the whole call. The settings are described at ClientBase.__init__.
    """

    _channel: grpc.Channel | None = None

    def __enter__(self) -> EncoderClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Closes the channel; calls in flight end. The client cannot be used again."""
        with self._opening:
            self._closed = True
            if self._channel is not None:
                self._channel.close()

    @overload
    def encode_images(
        self,
        images: Iterable[ImageInput],
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
    def encode_images(
        self,
        images: Iterable[ImageInput],
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
    def encode_images(
        self,
        images: Iterable[ImageInput],
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

    def encode_images(
        self,
        images: Iterable[ImageInput],
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
        """Vectors of images, in their order: [n, D] float32, float16 or int8, or uint8 [n, ceil(D / 8)] for binary.

        images: paths, bytes of picture files, uint8 arrays [h, w] or [h, w, 1|3|4], PIL images, in any mix; a
            generator is read as it is needed, and a stack [n, h, w, c] counts as n images. PIL images are turned
            upright by their EXIF orientation. Files are read when their batch is sent.
        dtype: float32, float16, int8 (with scales in the EncodeResult) or binary. dimensions: keep the first so many,
            0 keeps all. normalize: to length 1, after that (the default). pool: serve from this pool and no other.
        output: "tokens" asks for the features of every patch instead: a list of Features, raw, float32 or float16.
        on_error: "raise" raises EncodeError (with the good ones in `.result`) if an item fails; "mask" returns an
            EncodeResult, whatever happens to single items.
        timeout: seconds for each batch with its retries; None: the client's. progress: called with (done, total)
            after each batch; total is None for a generator.

        No images give an array [0, dimensions]. Raises TypeError for one image instead of a list, ValueError for an
        argument that cannot be, ServiceError (with what was collected in `.result`) when a batch fails as a whole.
        """
        wanted = Wanted(dtype, dimensions, normalize, pool, output=output)
        result = self._encode(images, self._job("image", images, wanted, on_error, timeout, progress))
        if on_error == "mask":
            return result
        return result.raise_for_errors() if output == "pooled" else result.raise_or_features()

    @overload
    def encode_text(
        self,
        texts: Iterable[str],
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
    def encode_text(
        self,
        texts: Iterable[str],
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

    def encode_text(
        self,
        texts: Iterable[str],
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
        """Vectors of texts; as encode_images, and:

        overflow: what becomes of a text with more tokens than the model takes: "truncate" cuts it and says so in
            EncodeResult.truncated, "refuse" makes it a failed item.
        """
        wanted = Wanted(dtype, dimensions, normalize, pool, overflow)
        result = self._encode(texts, self._job("text", texts, wanted, on_error, timeout, progress))
        return result if on_error == "mask" else result.raise_for_errors()

    def encode_stream(
        self,
        items: Iterable[ImageInput | str | tuple[str, ImageInput | str]],
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
    ) -> Generator[StreamResult, None, None]:
        """Yields one StreamResult for each item as soon as it is done, in whatever order; failed items too.

        items: as in encode_images, or texts for kind="text"; each may be `(id, item)`, else its id is its index. The
            iterable is read in a thread of its own.
        output: as in encode_images; with "tokens" each StreamResult holds `features` instead of a vector.
        window: items that are sent and not yet yielded, at most: the memory this takes, and how far a consumer that
            lags behind is run ahead of.
        timeout: seconds for the whole stream; None: no deadline, since a stream lives as long as its source.

        A broken stream is opened anew and what was not answered is sent again; an item that met a full queue is sent
        again too; both as `retries` allows. Stop early by closing the generator.
        """
        wanted = Wanted(dtype, dimensions, normalize, pool, overflow, output)
        ledger = self._ledger(kind, items, wanted, window, timeout)
        return BlockingStream(self._open().EncodeStream, self._metadata, ledger, window, self._error).results(items)

    def list_models(self) -> tuple[pb.Model, ...]:
        """The models that are served, as `encoder.v1.Model` messages."""
        response = self._unary(self._open().ListModels, pb.ListModelsRequest(), self._timeout, CallGroup())[0]
        return tuple(response.models)

    def get_model(self, name: str = "") -> pb.Model:
        """One model as an `encoder.v1.Model` message; an empty name means the client's model or else the default."""
        request = pb.GetModelRequest(model=name or self.model)
        response: pb.GetModelResponse = self._unary(self._open().GetModel, request, self._timeout, CallGroup())[0]
        return response.model

    def backend_report(self, pool: str = "") -> pb.GetBackendReportResponse:
        """What each replica chose and proved, as an `encoder.v1.GetBackendReportResponse`; empty: of all pools."""
        request = pb.GetBackendReportRequest(pool=pool)
        report: pb.GetBackendReportResponse
        report, _ = self._unary(self._open().GetBackendReport, request, self._timeout, CallGroup())
        return report

    def healthy(self, service: str = "", *, timeout: float = HEALTH_TIMEOUT) -> bool:
        """Whether the service (empty: the server as a whole) says by grpc.health.v1 that it serves; asks once.

        False also when nobody answers. Raises ServiceError when the service is unknown or does not let us ask.
        """
        stub = health_pb2_grpc.HealthStub(self._open_channel())
        request = health_pb2.HealthCheckRequest(service=service)
        try:
            answer = stub.Check(request, timeout=timeout, metadata=self._metadata)
        except grpc.RpcError as error:
            return self._unhealthy(Failure.of_call(error), timeout)
        return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)

    def _open_channel(self) -> grpc.Channel:
        with self._opening:
            self._check_open()
            if self._channel is None:
                to, options = self._connection, self._connection.channel_options()
                self._channel = (
                    grpc.secure_channel(to.address, to.credentials(), options)
                    if to.secure
                    else grpc.insecure_channel(to.address, options)
                )
            return self._channel

    def _open(self) -> encoder_pb2_grpc.EncoderServiceStub:
        return encoder_pb2_grpc.EncoderServiceStub(self._open_channel())

    def _encode(self, items: Iterable[object], job: EncodeJob) -> EncodeResult:
        stub, group = self._open(), CallGroup()
        pending: set[Future[Block]] = set()
        with ThreadPoolExecutor(self._concurrency, thread_name_prefix="encoder-client") as pool:

            def submit(batch: Batch | None) -> None:
                if batch is not None:
                    settle(self._concurrency - 1)
                    pending.add(pool.submit(self._send, stub, batch, group))

            def settle(left: int) -> None:
                while len(pending) > left:
                    for future in wait(pending, return_when=FIRST_COMPLETED).done:
                        pending.remove(future)
                        job.settle(future.result())

            try:
                for item in items:
                    submit(job.place(job.call.source(job.take(), item)))
                submit(job.flush())
                settle(0)
            except ServiceError as failure:
                raise job.abandon(failure) from None
            finally:
                group.cancel()
        job.tell()
        return job.result()

    def _send(self, stub: encoder_pb2_grpc.EncoderServiceStub, batch: Batch, group: CallGroup) -> Block:
        """Runs in a thread of the pool."""
        loaded = batch.load()
        if loaded.request is None:
            return batch.unsent(loaded)
        method = stub.EncodeText if batch.call.kind == "text" else stub.EncodeImages
        response, attempts = self._unary(method, loaded.request, batch.call.timeout, group)
        return batch.decode(loaded, response, attempts)

    def _unary(
        self, method: grpc.UnaryUnaryMultiCallable, request: object, timeout: float, group: CallGroup
    ) -> tuple[Any, int]:
        """The response of a call with its retries, and how often it was sent."""
        deadline = Deadline(timeout)
        attempt = 1
        while True:
            try:
                start = partial(method.future, request, timeout=deadline.for_grpc(), metadata=self._metadata)
                return group.run(start), attempt
            except grpc.RpcError as error:
                failure = Failure.of_call(error)
            pause = self._retry.pause(failure, attempt, deadline.remaining())
            if pause is None:
                raise self._error(failure, timeout)
            group.pause(pause)
            attempt += 1
