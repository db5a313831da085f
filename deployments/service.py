"""What one replica answers, without Ray: wire requests in, wire responses out.

    request → checks → room → pipeline (prepare, batch, forward) → finish → response

An item that fails is answered beside its neighbours; a whole call fails only for what concerns the whole call, with one
of the project's errors, whose `code` is the gRPC status. Deadlines are times of the running loop's clock.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from functools import partial

from deployments import wire
from deployments.admission import Room
from deployments.outcomes import Outcome, check_answer_size, finish_outcomes, timings_of
from deployments.pipeline import Caller, Pipeline, PreparedImage, ServedEngine
from deployments.settings import PoolSettings
from encoder.engine import RawPixels
from encoder.errors import (
    DeadlinePassed,
    EncoderError,
    InvalidImage,
    InvalidInput,
    NotReady,
    Overloaded,
    UnknownModel,
    Unsupported,
)
from encoder.features import check_feature_options
from encoder.memory import trim
from encoder.outputs import NonFiniteVector, OutputOptions, check_options
from encoder.v1 import encoder_pb2 as pb

NAMES = {"vision": "images", "text": "texts"}
RETRY_DELAY_BOUNDS_S = (0.05, 5.0)
CLOSE_TIMEOUT_S = 10.0
TRIM_AFTER_BYTES = 64 * 1024 * 1024


class EncoderCore:
    """Serves one engine. Made and used on one event loop; ended with `close`."""

    def __init__(self, engine: ServedEngine, settings: PoolSettings, identity: wire.ReplicaIdentity) -> None:
        self._engine = engine
        self._settings = settings
        self._identity = identity
        self._room = Room(settings.max_waiting_items, settings.max_waiting_bytes)
        self._pipeline = Pipeline(engine, settings)
        self._bytes_since_trim = 0
        self._closed = False

    async def encode_images(
        self, request: pb.EncodeImagesRequest, deadline: float | None = None
    ) -> pb.EncodeImagesResponse:
        """Answers every image of the request, in order."""
        count, size = len(request.images), request.ByteSize()
        options = self._check_batch("vision", request.options, count, size)
        async with self._call(count, size, deadline) as started:
            outcomes, answers, finish_ms = await self._encode_images(
                map(_source, request.images), options.output, self._pipeline.caller()
            )
        self._count_errors(answers)
        return pb.EncodeImagesResponse(
            results=[pb.ImageResult(**wire.outcome_fields(answer)) for answer in answers],
            provenance=self._provenance(outcomes),
            timings=timings_of(outcomes, started, finish_ms),
        )

    async def encode_text(self, request: pb.EncodeTextRequest, deadline: float | None = None) -> pb.EncodeTextResponse:
        """Answers every text of the request, in order."""
        count, size = len(request.texts), request.ByteSize()
        options = self._check_batch("text", request.options, count, size)
        async with self._call(count, size, deadline) as started:
            outcomes = await self._pipeline.encode_texts(request.texts, options.overflow, self._pipeline.caller())
            answers, finish_ms = finish_outcomes(outcomes, options.output)
        self._count_errors(answers)
        return pb.EncodeTextResponse(
            results=[
                pb.TextResult(
                    **wire.outcome_fields(answer), token_count=outcome.token_count, truncated=outcome.truncated
                )
                for answer, outcome in zip(answers, outcomes, strict=True)
            ],
            provenance=self._provenance(outcomes),
            timings=timings_of(outcomes, started, finish_ms),
        )

    async def encode_stream(
        self, requests: AsyncIterator[pb.EncodeStreamRequest], deadline: float | None = None
    ) -> AsyncIterator[pb.EncodeStreamResponse]:
        """Answers items as they get done; reads on only while fewer than `max_stream_items` are under way.

        Whatever concerns one item alone, unknown model included, is that item's error. Raises DeadlinePassed.
        """
        slots = asyncio.Semaphore(self._settings.max_stream_items)
        done: asyncio.Queue[pb.EncodeStreamResponse | None] = asyncio.Queue()
        caller = self._pipeline.caller()

        async def answer(request: pb.EncodeStreamRequest) -> None:
            done.put_nowait(await self._answer_streamed(request, caller))

        async def read() -> None:
            async with asyncio.timeout_at(deadline), asyncio.TaskGroup() as under_way:
                await slots.acquire()
                async for request in requests:
                    under_way.create_task(answer(request))
                    await slots.acquire()

        reader = asyncio.create_task(read())
        reader.add_done_callback(lambda _: done.put_nowait(None))
        try:
            while (response := await done.get()) is not None:
                yield response
                slots.release()
            await reader
        except (TimeoutError, ExceptionGroup) as error:
            raise _call_error(error) from None
        finally:
            reader.cancel()
            await asyncio.gather(reader, return_exceptions=True)

    def list_models(self) -> pb.ListModelsResponse:
        """The one model that is served here."""
        return pb.ListModelsResponse(models=[wire.model_to_proto(self._engine.info, self._identity.pool)])

    def get_model(self, request: pb.GetModelRequest) -> pb.GetModelResponse:
        """Raises UnknownModel for any name but the served one (or none)."""
        self._check_model(request.model)
        return pb.GetModelResponse(model=wire.model_to_proto(self._engine.info, self._identity.pool))

    def get_backend_report(self, request: pb.GetBackendReportRequest) -> pb.GetBackendReportResponse:
        """This replica's own report; raises UnknownModel for another pool."""
        self.check_pool(request.pool)
        return pb.GetBackendReportResponse(replicas=[self.replica_report()])

    def replica_report(self) -> pb.ReplicaReport:
        """All that this replica chose, proved and counted."""
        return wire.report_to_proto(self._engine.report(), self._identity)

    def check_pool(self, pool: str) -> None:
        """Raises UnknownModel when a request names another pool."""
        if pool and pool != self._identity.pool:
            raise UnknownModel(f"pool {pool!r} is not served here: this is pool {self._identity.pool!r}")

    async def check_health(self) -> None:
        """Raises when no forward gets through; see `Pipeline.check_forward`. Called periodically."""
        await self._pipeline.check_forward()
        if self._bytes_since_trim >= TRIM_AFTER_BYTES:
            self._bytes_since_trim = 0
            await asyncio.get_running_loop().run_in_executor(None, trim)

    def retry_after_s(self) -> float:
        """About how long what is under way still takes; for callers that are refused."""
        shortest, longest = RETRY_DELAY_BOUNDS_S
        return min(max(self._room.items * self._pipeline.ms_per_item / 1e3, shortest), longest)

    def queue_age_s(self) -> float:
        """How long the oldest item has been waiting, to be prepared or for the device; 0 when none waits."""
        return self._pipeline.queue_age_s()

    async def close(self) -> None:
        """Refuses what comes and what waits, lets the forward under way end, and gives the device back."""
        if not self._closed:
            self._closed = True
            await self._pipeline.close(CLOSE_TIMEOUT_S)

    async def _encode_images(
        self, sources: Iterable[Callable[[], bytes | RawPixels]], output: OutputOptions, caller: Caller
    ) -> tuple[list[Outcome], list[wire.Answer], float]:
        """What became of each picture, its answer, and the milliseconds of finishing."""
        if output.kind == "pooled":
            outcomes = await self._pipeline.encode_images(sources, caller)
            return outcomes, *finish_outcomes(outcomes, output)
        images = await self._pipeline.prepare_images(sources, caller)
        grids = [image.grid for image in images if isinstance(image, PreparedImage)]
        size = check_answer_size(
            grids, self._engine.info.token_dimensions, output.dtype, self._settings.max_response_bytes,
            "max_response_bytes of this pool",
        )  # fmt: skip
        with self._room.hold_answer(len(images), size):
            outcomes = await self._pipeline.features_of(images, caller)
            return outcomes, *finish_outcomes(outcomes, output)

    def _check_batch(self, tower: str, options: pb.EncodeOptions, count: int, size: int) -> wire.CallOptions:
        if not count:
            raise InvalidInput("the request holds no items: send at least one")
        limit = self._settings.max_items_per_request
        if count > limit:
            raise InvalidInput(f"the request holds {count} items, this pool takes {limit}: send smaller batches")
        return self._check_request(tower, options, size)

    def _check_request(self, tower: str, options: pb.EncodeOptions, size: int) -> wire.CallOptions:
        if self._closed:
            raise NotReady("this replica is shutting down: try another one")
        self._bytes_since_trim += size
        limit = self._settings.max_request_bytes
        if size > limit:
            raise InvalidInput(f"the request has {size} bytes, this pool takes {limit}: send smaller batches")
        parsed = wire.options_from_proto(options)
        self.check_pool(parsed.pool)
        self._check_model(parsed.model)
        info = self._engine.info
        if tower != info.tower:
            reason = f"{info.name} is a {info.family} model, for pictures alone: it has no text tower"
            if not info.vision_only:
                reason = f"it serves the {info.tower} tower of {info.name}, not its {tower} tower: ask a pool that does"
            raise Unsupported(f"pool {self._identity.pool!r} takes no {NAMES[tower]}: {reason}")
        if parsed.output.kind == "pooled":
            check_options(parsed.output, info.dimensions)
        elif not info.token_dimensions:
            raise Unsupported(f"{info.name}: the {info.tower} tower gives no patch features: ask for the vector")
        else:
            check_feature_options(parsed.output)
        return parsed

    def _check_model(self, model: str) -> None:
        if model and model != self._engine.info.name:
            raise UnknownModel(f"model {model!r} is not served here: this pool serves {self._engine.info.name!r}")

    @asynccontextmanager
    async def _call(self, count: int, size: int, deadline: float | None) -> AsyncIterator[float]:
        """Room and deadline for one call; gives the time it started (monotonic)."""
        try:
            with self._room.hold(count, size):
                async with asyncio.timeout_at(deadline):
                    yield time.monotonic()
        except Overloaded:
            self._engine.count("calls_overloaded")
            raise
        except TimeoutError as error:
            self._engine.count("calls_past_deadline")
            raise _call_error(error) from None
        except asyncio.CancelledError:
            self._engine.count("calls_cancelled")
            raise

    async def _answer_streamed(self, request: pb.EncodeStreamRequest, caller: Caller) -> pb.EncodeStreamResponse:
        started, size = time.monotonic(), request.ByteSize()
        answer: wire.Answer
        try:
            kind = request.WhichOneof("item")
            if kind is None:
                raise InvalidInput("the item holds neither an image nor a text: send one of them")
            options = self._check_request("vision" if kind == "image" else "text", request.options, size)
            async with self._room.hold_when_free(1, size):
                if kind == "image":
                    source = _source(request.image)
                    (outcome,), (answer,), finish_ms = await self._encode_images([source], options.output, caller)
                else:
                    (outcome,) = await self._pipeline.encode_texts([request.text], options.overflow, caller)
                    (answer,), finish_ms = finish_outcomes([outcome], options.output)
        except EncoderError as error:
            answer, outcome, finish_ms = error, Outcome(started, error=error), 0.0
        self._count_errors([answer])
        return pb.EncodeStreamResponse(
            id=request.id,
            **wire.outcome_fields(answer),
            provenance=self._provenance([outcome]),
            timings=timings_of([outcome], started, finish_ms),
            token_count=outcome.token_count,
            truncated=outcome.truncated,
        )

    def _provenance(self, outcomes: Sequence[Outcome]) -> pb.Provenance:
        rows = [outcome.row for outcome in outcomes if outcome.row is not None]
        reasons = sorted({row.fallback_reason for row in rows if row.fallback_reason})
        return pb.Provenance(
            model=self._engine.info.name,
            model_revision=self._engine.info.revision,
            fingerprint=self._engine.info.fingerprint,
            pool=self._identity.pool,
            replica=self._identity.replica,
            attention_backend=rows[-1].attention_backend if rows else self._engine.resolved.name,
            runner=rows[-1].runner if rows else "",
            fallback=bool(reasons),
            fallback_reason="; ".join(reasons),
        )

    def _count_errors(self, answers: Sequence[wire.Answer]) -> None:
        for counter, kind in (("item_errors", EncoderError), ("non_finite", NonFiniteVector)):
            if errors := sum(isinstance(answer, kind) for answer in answers):
                self._engine.count(counter, errors)


def _source(image: pb.Image) -> Callable[[], bytes | RawPixels]:
    """Reads the picture out of the message when it is called: the bytes are copied there."""
    return partial(_read_source, image)


def _read_source(image: pb.Image) -> bytes | RawPixels:
    kind = image.WhichOneof("source")
    if kind is None:
        raise InvalidImage("the image holds neither an encoded picture nor pixels: send one of them")
    if kind == "encoded":
        return image.encoded
    pixels = image.pixels
    return RawPixels(pixels.data, pixels.height, pixels.width, pixels.channels)


def _call_error(error: Exception) -> Exception:
    """The one error a call fails with."""
    if isinstance(error, ExceptionGroup):
        return _call_error(error.exceptions[0])
    if isinstance(error, TimeoutError):
        return DeadlinePassed("the deadline went by before all items were computed")
    return error
