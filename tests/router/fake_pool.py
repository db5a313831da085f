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
SERVE = "ray.serve.RayServeAPIService"
DIMENSIONS = 8
Trailers = tuple[tuple[str, bytes], ...]
REPLICA_DIED = (
    "The actor died unexpectedly before finishing this task.\n\tclass_name: ServeReplica:vision-cpu:encoder\n"
    "\tactor_id: 0123456789abcdef01234567\n\tpid: 4242\n\tip: 10.1.2.3\nThe actor is dead because its worker process "
    "has died. Worker exit type: SYSTEM_ERROR"
)


def vector_of(content: bytes) -> np.ndarray:
    """The vector a fake pool gives an item: unlike for unlike content, of length 1; float32 [DIMENSIONS]."""
    digest = np.frombuffer(hashlib.sha256(content).digest()[:DIMENSIONS], dtype=np.uint8)
    vector = digest.astype(np.float32) + 1.0
    return vector / np.linalg.norm(vector)


def turned(vector: np.ndarray, cosine: float) -> np.ndarray:
    """A vector of the same length at this cosine to `vector`."""
    across = np.roll(vector, 1) * np.where(np.arange(len(vector)) % 2, 1.0, -1.0)
    across -= vector * (across @ vector) / (vector @ vector)
    across *= np.linalg.norm(vector) / np.linalg.norm(across)
    return (cosine * vector + np.sqrt(1.0 - cosine**2) * across).astype(np.float32)


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
    # What the router sends by itself: a probe, or golden inputs.
    is_probe: bool
    is_golden: bool


@dataclass
class FakePool:
    """One application. Change its fields to change how it behaves; probes behave as other requests do."""

    name: str
    tower: str = "vision"
    model: str = "clip"
    revision: str = "r1"
    fingerprint: str = "f1"
    dtype: str = "bfloat16"
    # The family's mask needs, those that the backend declares, and counters of each replica's report.
    mask_needs: Sequence[str] = ()
    backend_masks: Sequence[str] = ()
    counters: dict[str, int] = field(default_factory=dict)
    # Outcome of each replica's self-check; None: none was made.
    self_check: bool | None = True
    # So many replicas gave up a backend that failed its self-check.
    demoted: int = 0
    # Set in every answer's provenance when it is not empty.
    fallback_reason: str = ""
    dimensions: int = DIMENSIONS
    listed_dimensions: int | None = None
    items_per_second: float = 0.0
    # Replicas answer by turns.
    replicas: int = 1
    generation: str = ""
    latency_s: float = 0.0
    # Time on the device, which does one request after another, and when it is free (the loop's clock): what a busy
    # machine adds to a sleep does not add up.
    forward_s: float = 0.0
    free_at: float = 0.0
    # Failures of the next requests that are not probes, one each.
    failures: deque[Failure] = field(default_factory=deque)
    # A failure of every request, probes too.
    broken: Failure | None = None
    # Only probes fail with this.
    probe_failure: Failure | None = None
    # Failure of ListModels and GetBackendReport.
    unlisted: Failure | None = None
    # Failure of GetBackendReport alone; and how often it was asked for.
    report_failure: Failure | None = None
    reports: int = 0
    # While this is clear, requests wait.
    released: asyncio.Event = field(default_factory=asyncio.Event)
    # Probes are never answered.
    hold_probes: bool = False
    # Content of items that fail alone.
    bad_items: set[bytes] = field(default_factory=set)
    # Overrides the vector of every item.
    vector: np.ndarray | None = None
    # Overrides the fingerprint of a replica, and turns its vectors away from what they should be.
    replica_fingerprints: dict[str, str] = field(default_factory=dict)
    wrong_replicas: set[str] = field(default_factory=set)
    # Turns every vector away, to this cosine.
    cosine: float = 1.0
    # Content that kills the replica that works on it.
    deadly: set[bytes] = field(default_factory=set)
    deaths: int = 0
    # Only golden inputs fail with this.
    golden_failure: Failure | None = None
    answer: bytes | None = None

    seen: list[Seen] = field(default_factory=list)
    in_flight: int = 0
    most_in_flight: int = 0
    cancelled: int = 0

    def __post_init__(self) -> None:
        self.released.set()
        self._turn = -1

    @property
    def requests(self) -> list[Seen]:
        """What was seen without the router's own."""
        return [seen for seen in self.seen if not (seen.is_probe or seen.is_golden)]

    @property
    def goldens(self) -> list[Seen]:
        return [seen for seen in self.seen if seen.is_golden]

    @property
    def replica_names(self) -> list[str]:
        return [f"{self.name}{self.generation}-{index}" for index in range(self.replicas)]

    @property
    def probes(self) -> list[Seen]:
        return [seen for seen in self.seen if seen.is_probe]

    async def encode(self, method: str, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        metadata = _metadata(context)
        request_id = metadata.get("x-request-id", "")
        probe, golden = request_id.startswith("probe-"), request_id.startswith("golden-")
        own = probe or golden
        self.seen.append(Seen(method, request, metadata, context.time_remaining(), probe, golden))
        if not own:
            self.in_flight += 1
            self.most_in_flight = max(self.most_in_flight, self.in_flight)
        try:
            await asyncio.sleep(self.latency_s)
            if self.forward_s:
                now = asyncio.get_running_loop().time()
                self.free_at = max(self.free_at, now) + self.forward_s
                await asyncio.sleep(self.free_at - now)
            if not own:
                await self.released.wait()
            elif probe and self.hold_probes:
                await asyncio.Event().wait()
            await self._fail_if_told(probe, golden, context)
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            if not own:
                self.in_flight -= 1
        if any(content in request for content in self.deadly):
            self.deaths += 1
            await context.abort(grpc.StatusCode.INTERNAL, REPLICA_DIED)
        return self.answer if self.answer is not None and not own else self._response(method, request)

    async def _fail_if_told(self, probe: bool, golden: bool, context: grpc.aio.ServicerContext) -> None:
        failure = self.broken
        if probe and failure is None:
            failure = self.probe_failure
        if golden and failure is None:
            failure = self.golden_failure
        if not (probe or golden) and failure is None and self.failures:
            failure = self.failures.popleft()
        if failure is not None:
            await context.abort(failure.code, failure.details, failure.trailers)

    def _response(self, method: str, request: bytes) -> bytes:
        self._turn += 1
        replica = self.replica_names[self._turn % self.replicas]
        provenance = pb.Provenance(
            model=self.model,
            model_revision=self.revision,
            pool=self.name,
            replica=replica,
            fingerprint=self.replica_fingerprints.get(replica, self.fingerprint),
            fallback=bool(self.fallback_reason),
            fallback_reason=self.fallback_reason,
        )
        cosine = -1.0 if replica in self.wrong_replicas else self.cosine
        timings = pb.StageTimings(forward_ms=1.5, batch_size=1)
        if method == "EncodeText":
            texts = pb.EncodeTextRequest.FromString(request).texts
            response = pb.EncodeTextResponse(provenance=provenance, timings=timings)
            for text in texts:
                result = response.results.add(token_count=len(text.split()) + 2, truncated=len(text) > 100)
                self._fill(result, text.encode(), cosine)
        else:
            images = pb.EncodeImagesRequest.FromString(request).images
            response = pb.EncodeImagesResponse(provenance=provenance, timings=timings)
            for image in images:
                self._fill(response.results.add(), image.encoded or image.pixels.data, cosine)
        return response.SerializeToString()

    def _fill(self, result: pb.ImageResult | pb.TextResult, content: bytes, cosine: float) -> None:
        if content in self.bad_items:
            result.error.code, result.error.message = 3, "not a picture"
            return
        vector = vector_of(content)[: self.dimensions] if self.vector is None else self.vector
        if cosine != 1.0:
            vector = turned(vector, cosine)
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
            mask_needs=self.mask_needs,
            compute_dtype=self.dtype,
        )
        model = pb.Model(name=self.model, revision=self.revision, family="clip", towers=[served])
        return pb.ListModelsResponse(models=[model]).SerializeToString()

    async def report(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        self.reports += 1
        failure = self.unlisted or self.report_failure
        if failure is not None:
            await context.abort(failure.code, failure.details)
        checks = [] if self.self_check is None else [pb.SelfCheckReport(backend="sdpa", passed=self.self_check)]
        failed = [pb.SelfCheckReport(backend="ascend_attn", passed=False)]
        given_up = [
            pb.RejectedBackend(name="flash_attn", reason="not installed"),
            pb.RejectedBackend(name="ascend_attn", reason="self-check failed: mask none: cosine 0.5"),
        ]
        replicas = [
            pb.ReplicaReport(
                replica=name,
                tower=pb.TOWER_TEXT if self.tower == "text" else pb.TOWER_VISION,
                model=self.model,
                model_revision=self.revision,
                fingerprint=self.replica_fingerprints.get(name, self.fingerprint),
                backend=pb.BackendReport(
                    name="sdpa", mask_needs=self.backend_masks, rejected=given_up[: 2 if number < self.demoted else 1]
                ),
                self_checks=[*failed[: number < self.demoted], *checks],
                items_per_second=self.items_per_second,
                counters=self.counters,
                compute_dtype=self.dtype,
            )
            for number, name in enumerate(self.replica_names)
        ]
        return pb.GetBackendReportResponse(replicas=replicas).SerializeToString()


class PoolServer:
    """A gRPC address with applications behind it."""

    def __init__(
        self, pools: Sequence[FakePool], port: int = 0, credentials: grpc.ServerCredentials | None = None
    ) -> None:
        self.pools = {pool.name: pool for pool in pools}
        # Pings and large messages must pass: the caps under test are the router's.
        options = (("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0))
        self._server = grpc.aio.server(options=options)
        methods = {
            name: grpc.unary_unary_rpc_method_handler(self._handler(name))
            for name in ("EncodeImages", "EncodeText", "ListModels", "GetBackendReport")
        }
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, methods),))
        # The answer of Serve's proxy to ListApplications; a failure instead when it is set.
        self.unlisted: Failure | None = None
        # What it names instead of all of its pools.
        self.listed: list[str] | None = None
        self.listings = 0
        serve = {"ListApplications": grpc.unary_unary_rpc_method_handler(self._list_applications)}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVE, serve),))
        if credentials is None:
            self.port = self._server.add_insecure_port(f"127.0.0.1:{port}")
        else:
            self.port = self._server.add_secure_port(f"127.0.0.1:{port}", credentials)

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

    async def _list_applications(self, request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        self.listings += 1
        if self.unlisted is not None:
            await context.abort(self.unlisted.code, self.unlisted.details)
        # As ray.serve.ListApplicationsResponse: field 1, each name length-delimited.
        names = list(self.pools) if self.listed is None else self.listed
        return b"".join(b"\x0a" + bytes([len(name)]) + name.encode() for name in names)

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
