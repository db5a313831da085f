"""A gRPC service that speaks encoder.v1, computes the formula, and fails as it is told."""

import queue
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from encoder.v1 import encoder_pb2 as pb
from encoder.v1 import encoder_pb2_grpc
from tests.client.formula import expected, patch_numbers

MAX_TOKENS = 7


def retry_status(code: grpc.StatusCode, details: str, delay: float | None) -> status_pb2.Status:
    status = status_pb2.Status(code=code.value[0], message=details)
    if delay is not None:
        packed = any_pb2.Any()
        whole = int(delay)
        wait = duration_pb2.Duration(seconds=whole, nanos=round((delay - whole) * 1e9))
        packed.Pack(error_details_pb2.RetryInfo(retry_delay=wait))
        status.details.append(packed)
    return status


def pack(vector, dtype: int) -> pb.Embedding:
    """Packs with struct and int arithmetic, so that the client's numpy is not tested against itself."""
    values, scale = [float(value) for value in vector], 0.0
    if dtype == pb.EMBEDDING_DTYPE_FLOAT16:
        data = struct.pack(f"<{len(values)}e", *values)
    elif dtype == pb.EMBEDDING_DTYPE_INT8:
        scale = struct.unpack("<f", struct.pack("<f", max(map(abs, values)) / 127))[0]
        data = struct.pack(f"<{len(values)}b", *(max(-127, min(127, round(value / scale))) for value in values))
    elif dtype == pb.EMBEDDING_DTYPE_BINARY:
        padded = [value > 0 for value in values] + [False] * (-len(values) % 8)
        data = bytes(
            sum(bit << (7 - place) for place, bit in enumerate(padded[at : at + 8])) for at in range(0, len(padded), 8)
        )
    else:
        data = struct.pack(f"<{len(values)}f", *values)
    return pb.Embedding(values=data, dtype=dtype, dimensions=len(values), scale=scale)


def payload_of(image: pb.Image) -> bytes:
    if image.WhichOneof("source") == "pixels":
        pixels = image.pixels
        return f"{pixels.height}x{pixels.width}x{pixels.channels}:".encode() + pixels.data
    return image.encoded


@dataclass
class Seen:
    """One call that came in."""

    method: str
    request: object
    metadata: dict[str, str]
    at: float
    seconds_left: float | None


@dataclass
class Service(encoder_pb2_grpc.EncoderServiceServicer):
    """Items whose payload begins with BAD fail, with MUTE get no outcome, SHORT a byte too few, LONG a dimension more,
    OTHER another dtype; a stream answers FULL with a full queue the first time.
    """

    failures: deque[status_pb2.Status] = field(default_factory=deque)
    seen: list[Seen] = field(default_factory=list)
    provenance: Callable[[int], pb.Provenance] = lambda number: pb.Provenance(fingerprint="f1", pool="vision-cpu")
    before_answer: Callable[[object, grpc.ServicerContext], None] = lambda request, context: None
    drop_results: int = 0
    # For each stream: abort it after so many answers; None lets it run.
    stream_limits: deque[int | None] = field(default_factory=deque)
    stream_end: Callable[[grpc.ServicerContext], None] = lambda context: context.abort(
        grpc.StatusCode.UNAVAILABLE, "draining"
    )
    stream_received: list[str] = field(default_factory=list)
    # A stream's items are answered in pairs, and one that nothing follows after so many seconds.
    alone_after: float = 0.05
    full_queue_delay: float = 0.05
    in_flight: int = 0
    most_in_flight: int = 0
    items_answered: int = 0
    lock: threading.Lock = field(default_factory=threading.Lock)
    full_once: set[str] = field(default_factory=set)

    def fail_next(
        self, code: grpc.StatusCode, details: str = "told to fail", *, retry_after: float | None = None, times: int = 1
    ) -> None:
        self.failures.extend(retry_status(code, details, retry_after) for _ in range(times))

    def _enter(self, method: str, request: object, context: grpc.ServicerContext) -> int:
        metadata = dict(context.invocation_metadata())
        with self.lock:
            self.seen.append(Seen(method, request, metadata, time.monotonic(), context.time_remaining()))
            failure = self.failures.popleft() if self.failures else None
            number = len(self.seen)
        if failure is not None:
            context.set_trailing_metadata((("grpc-status-details-bin", failure.SerializeToString()),))
            context.abort(next(c for c in grpc.StatusCode if c.value[0] == failure.code), failure.message)
        return number

    def _outcome(self, payload: bytes, options: pb.EncodeOptions) -> dict:
        if payload.startswith(b"BAD"):
            return {"error": status_pb2.Status(code=3, message="cannot decode it:\nno picture; send JPEG or PNG")}
        if payload.startswith(b"MUTE"):
            return {}
        if options.output == pb.OUTPUT_KIND_TOKENS:
            return self._features(payload, options)
        normalize = options.normalize if options.HasField("normalize") else True
        dimensions = options.dimensions
        if payload.startswith(b"LONG"):
            dimensions = 13
        dtype = options.dtype
        if payload.startswith(b"OTHER"):
            dtype = pb.EMBEDDING_DTYPE_FLOAT16 if dtype != pb.EMBEDDING_DTYPE_FLOAT16 else pb.EMBEDDING_DTYPE_FLOAT32
        embedding = pack(expected(payload, dimensions, normalize), dtype)
        if payload.startswith(b"SHORT"):
            embedding.values = embedding.values[:-1]
        return {"embedding": embedding}

    def _features(self, payload: bytes, options: pb.EncodeOptions) -> dict:
        rows, columns, numbers = patch_numbers(payload)
        code = "e" if options.dtype == pb.EMBEDDING_DTYPE_FLOAT16 else "f"
        values = struct.pack(f"<{len(numbers)}{code}", *numbers)
        features = pb.Features(
            values=values, dtype=options.dtype, tokens=rows * columns, dimensions=3, grid=[rows, columns]
        )
        if payload.startswith(b"SHORT"):
            features.values = features.values[:-1]
        if payload.startswith(b"GRID"):
            features.grid[0] += 1
        if payload.startswith(b"LONG"):
            features.dimensions, features.tokens = 3 * rows * columns, 1
            features.grid[:] = [1, 1]
        if payload.startswith(b"OTHER"):
            return {"embedding": pack(expected(payload), pb.EMBEDDING_DTYPE_FLOAT32)}
        return {"features": features}

    def _text_fields(self, text: str, options: pb.EncodeOptions) -> dict:
        tokens = len(text.split()) + 2
        too_long = tokens > MAX_TOKENS
        if too_long and options.text_overflow == pb.TEXT_OVERFLOW_REFUSE:
            status = status_pb2.Status(code=3, message=f"{tokens} tokens, the model takes {MAX_TOKENS}")
            return {"error": status, "token_count": tokens}
        return {**self._outcome(text.encode(), options), "token_count": tokens, "truncated": too_long}

    def _answer(self, results: list, number: int, request: object, context: grpc.ServicerContext, kind: type):
        with self.lock:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        self.before_answer(request, context)
        with self.lock:
            self.in_flight -= 1
            self.items_answered += len(results)
        results = results[: len(results) - self.drop_results]
        timings = pb.StageTimings(forward_ms=1.5, batch_size=len(results))
        return kind(results=results, provenance=self.provenance(number), timings=timings)

    def EncodeImages(self, request, context):
        number = self._enter("EncodeImages", request, context)
        results = [pb.ImageResult(**self._outcome(payload_of(image), request.options)) for image in request.images]
        return self._answer(results, number, request, context, pb.EncodeImagesResponse)

    def EncodeText(self, request, context):
        number = self._enter("EncodeText", request, context)
        results = [pb.TextResult(**self._text_fields(text, request.options)) for text in request.texts]
        return self._answer(results, number, request, context, pb.EncodeTextResponse)

    def EncodeStream(self, request_iterator, context) -> Iterator[pb.EncodeStreamResponse]:
        self._enter("EncodeStream", None, context)
        limit = self.stream_limits.popleft() if self.stream_limits else None
        answers: queue.SimpleQueue = queue.SimpleQueue()
        threading.Thread(target=self._read_stream, args=(request_iterator, answers), daemon=True).start()
        count = 0
        while count != limit and (response := answers.get()) is not None:
            count += 1
            yield response
        if count == limit:
            self.stream_end(context)

    def _read_stream(self, requests, answers: queue.SimpleQueue) -> None:
        """Answers each pair of items in reverse order, and a single one that nothing follows after a moment."""
        held: list[pb.EncodeStreamResponse] = []
        timer = None

        def release() -> None:
            with self.lock:
                ready = held[::-1]
                held.clear()
            for response in ready:
                answers.put(response)

        try:
            for request in requests:
                self.stream_received.append(request.id)
                answer = self._stream_answer(request)
                with self.lock:
                    held.append(answer)
                if timer is not None:
                    timer.cancel()
                if len(held) >= 2:
                    release()
                else:
                    timer = threading.Timer(self.alone_after, release)
                    timer.start()
        except grpc.RpcError:
            pass
        release()
        answers.put(None)

    def _stream_answer(self, request: pb.EncodeStreamRequest) -> pb.EncodeStreamResponse:
        common = {"id": request.id, "provenance": pb.Provenance(fingerprint="f1"), "timings": pb.StageTimings()}
        if request.WhichOneof("item") == "text":
            return pb.EncodeStreamResponse(**common, **self._text_fields(request.text, request.options))
        payload = payload_of(request.image)
        if payload.startswith(b"STRAY"):
            return pb.EncodeStreamResponse(id="999", error=status_pb2.Status(code=3))
        if payload.startswith(b"FULL") and request.id not in self.full_once:
            self.full_once.add(request.id)
            error = retry_status(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", self.full_queue_delay)
            return pb.EncodeStreamResponse(**common, error=error)
        return pb.EncodeStreamResponse(**common, **self._outcome(payload, request.options))

    def ListModels(self, request, context):
        self._enter("ListModels", request, context)
        return pb.ListModelsResponse(models=[pb.Model(name="demo", family="clip"), pb.Model(name="other")])

    def GetModel(self, request, context):
        self._enter("GetModel", request, context)
        if request.model == "unknown":
            context.abort(grpc.StatusCode.NOT_FOUND, "no model 'unknown' here: 'demo' is served")
        return pb.GetModelResponse(model=pb.Model(name=request.model or "demo"))

    def GetBackendReport(self, request, context):
        self._enter("GetBackendReport", request, context)
        replica = pb.ReplicaReport(pool=request.pool or "vision-cpu", backend=pb.BackendReport(name="sdpa"))
        return pb.GetBackendReportResponse(replicas=[replica])


@dataclass
class Running:
    """A service on a port of this machine. health: its grpc.health.v1 servicer."""

    service: Service
    server: grpc.Server
    port: int
    health: health.HealthServicer

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"


def start(credentials: grpc.ServerCredentials | None = None, max_message_bytes: int = 64 * 2**20) -> Running:
    options = [
        ("grpc.max_receive_message_length", max_message_bytes),
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.so_reuseport", 0),
    ]
    server = grpc.server(ThreadPoolExecutor(16), options=options)
    service, checks = Service(), health.HealthServicer()
    encoder_pb2_grpc.add_EncoderServiceServicer_to_server(service, server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    checks.set("", health_pb2.HealthCheckResponse.SERVING)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    return Running(service, server, port, checks)
