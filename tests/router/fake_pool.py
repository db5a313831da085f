"""Pools for the router's tests: real gRPC servers that answer as a Serve application would, and misbehave on demand.

A server hosts several applications and tells them apart by the `application` metadata, as Ray Serve does. Requests are
taken as raw bytes, so that a test can compare them with what the client sent.
"""

import asyncio
import hashlib
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

import grpc
import numpy as np

from encoder.v1 import encoder_pb2 as pb

SERVICE = "encoder.v1.EncoderService"
DIMENSIONS = 8
Trailers = tuple[tuple[str, bytes], ...]


def vector_of(content: bytes) -> np.ndarray:
    """The vector a fake pool gives an item: unlike for unlike content, of length 1; float32 [DIMENSIONS]."""
    digest = np.frombuffer(hashlib.sha256(content).digest()[:DIMENSIONS], dtype=np.uint8)
    vector = digest.astype(np.float32) + 1.0
    return vector / np.linalg.norm(vector)


@dataclass(frozen=True)
class Failure:
    """A failure that a pool answers with."""

    code: grpc.StatusCode
    details: str = ""
    trailers: Trailers = ()


@dataclass
class Seen:
    """One encoding request as the pool got it."""

    method: str
    request: bytes
    metadata: dict[str, str]
    time_remaining: float | None
    is_probe: bool


@dataclass
class FakePool:
    """One application. Change its fields to change how it behaves; probes behave as other requests do."""

    name: str
    tower: str = "vision"
    model: str = "clip"
    revision: str = "r1"
    fingerprint: str = "f1"
    dimensions: int = DIMENSIONS
    listed_dimensions: int | None = None
    items_per_second: float = 0.0
    replicas: int = 1
    latency_s: float = 0.0
    # Time on the device, which does one request after another.
    forward_s: float = 0.0
    device: asyncio.Lock = field(default_factory=asyncio.Lock)
    # Failures of the next requests that are not probes, one each.
    failures: deque[Failure] = field(default_factory=deque)
    # A failure of every request, probes too.
    broken: Failure | None = None
    # Only probes fail with this.
    probe_failure: Failure | None = None
    # Failure of ListModels and GetBackendReport.
    unlisted: Failure | None = None
    # While this is clear, requests wait.
    released: asyncio.Event = field(default_factory=asyncio.Event)
    # Probes are never answered.
    hold_probes: bool = False
    # Content of items that fail alone.
    bad_items: set[bytes] = field(default_factory=set)
    # Overrides the vector of every item.
    vector: np.ndarray | None = None
    answer: bytes | None = None

    seen: list[Seen] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    cancelled: int = 0

    def __post_init__(self) -> None:
        self.released.set()

    @property
    def requests(self) -> list[Seen]:
        """What was seen without the probes."""
        return [seen for seen in self.seen if not seen.is_probe]

    @property
    def probes(self) -> list[Seen]:
        return [seen for seen in self.seen if seen.is_probe]

    async def encode(self, method: str, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        metadata = _metadata(context)
        probe = metadata.get("x-request-id", "").startswith("probe-")
        self.seen.append(Seen(method, request, metadata, context.time_remaining(), probe))
        if not probe:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.latency_s)
            if self.forward_s:
                async with self.device:
                    await asyncio.sleep(self.forward_s)
            if not probe:
                await self.released.wait()
            elif self.hold_probes:
                await asyncio.Event().wait()
            await self._fail_if_told(probe, context)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            if not probe:
                self.in_flight -= 1
        return self.answer if self.answer is not None else self._response(method, request)

    async def _fail_if_told(self, probe: bool, context: grpc.aio.ServicerContext) -> None:
        failure = self.broken
        if probe and failure is None:
            failure = self.probe_failure
        if not probe and failure is None and self.failures:
            failure = self.failures.popleft()
        if failure is not None:
            await context.abort(failure.code, failure.details, failure.trailers)

    def _response(self, method: str, request: bytes) -> bytes:
        provenance = pb.Provenance(model=self.model, pool=self.name, fingerprint=self.fingerprint)
        timings = pb.StageTimings(forward_ms=1.5, batch_size=1)
        if method == "EncodeText":
            texts = pb.EncodeTextRequest.FromString(request).texts
            response = pb.EncodeTextResponse(provenance=provenance, timings=timings)
            for text in texts:
                result = response.results.add(token_count=len(text.split()) + 2, truncated=len(text) > 100)
                self._fill(result, text.encode())
        else:
            images = pb.EncodeImagesRequest.FromString(request).images
            response = pb.EncodeImagesResponse(provenance=provenance, timings=timings)
            for image in images:
                self._fill(response.results.add(), image.encoded or image.pixels.data)
        return response.SerializeToString()

    def _fill(self, result: pb.ImageResult | pb.TextResult, content: bytes) -> None:
        if content in self.bad_items:
            result.error.code, result.error.message = 3, "not a picture"
            return
        vector = vector_of(content)[: self.dimensions] if self.vector is None else self.vector
        result.embedding.values = vector.astype("<f4").tobytes()
        result.embedding.dtype, result.embedding.dimensions = pb.EMBEDDING_DTYPE_FLOAT32, len(vector)

    async def list_models(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        if self.unlisted is not None:
            await context.abort(self.unlisted.code, self.unlisted.details)
        tower = pb.TOWER_TEXT if self.tower == "text" else pb.TOWER_VISION
        served = pb.ServedTower(
            tower=tower,
            dimensions=self.listed_dimensions or self.dimensions,
            pools=["named-otherwise-inside"],
            fingerprint=self.fingerprint,
            compute_dtype="bfloat16",
        )
        model = pb.Model(name=self.model, revision=self.revision, family="clip", towers=[served])
        return pb.ListModelsResponse(models=[model]).SerializeToString()

    async def report(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        if self.unlisted is not None:
            await context.abort(self.unlisted.code, self.unlisted.details)
        replicas = [
            pb.ReplicaReport(replica=f"{self.name}-{index}", items_per_second=self.items_per_second)
            for index in range(self.replicas)
        ]
        return pb.GetBackendReportResponse(replicas=replicas).SerializeToString()


class PoolServer:
    """A gRPC address with applications behind it."""

    def __init__(self, pools: Sequence[FakePool], port: int = 0) -> None:
        self.pools = {pool.name: pool for pool in pools}
        # Pings and large messages must pass: the caps under test are the router's.
        options = (("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0))
        self._server = grpc.aio.server(options=options)
        methods = {
            name: grpc.unary_unary_rpc_method_handler(self._handler(name))
            for name in ("EncodeImages", "EncodeText", "ListModels", "GetBackendReport")
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    async def __aenter__(self) -> "PoolServer":
        await self._server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Cuts all connections, as the death of a node does."""
        await self._server.stop(None)

    def _handler(self, method: str) -> Callable[[bytes, grpc.aio.ServicerContext], Awaitable[bytes]]:
        async def handle(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
            name = _metadata(context).get("application", "")
            pool = self.pools.get(name)
            if pool is None:
                hint = "Ping /ray.serve.RayServeAPIService/ListApplications for available applications."
                await context.abort(grpc.StatusCode.NOT_FOUND, f"Application '{name}' not found. {hint}")
            if method == "ListModels":
                return await pool.list_models(request, context)
            if method == "GetBackendReport":
                return await pool.report(request, context)
            return await pool.encode(method, request, context)

        return handle


def _metadata(context: grpc.aio.ServicerContext) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() if isinstance(value, str)}
