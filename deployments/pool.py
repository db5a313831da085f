"""The Serve deployment of a pool: one replica, one engine, one device, around `deployments.service.EncoderCore`.

What Ray Serve 2.60 does with errors decides how they are answered here. A handler that raises is logged with its
traceback, and its trailing metadata (RetryInfo) is lost; a unary handler that sets code, details and metadata and then
returns an empty message is answered with just these, by the stock proxy and behind HAProxy alike. The stock proxy reads
a stream's status off its messages only, so a failed stream does have to raise.
"""

import asyncio
import gc
import logging
import os
import socket
import warnings
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar, cast

import ray
from ray import serve
from ray.experimental import internal_kv
from ray.serve.grpc_util import RayServegRPCContext, gRPCInputStream

from deployments import wire
from deployments.events import FAILED_STAGE
from deployments.imports import nothing_for_training
from deployments.scaling import QUEUE_AGE_KEY
from deployments.settings import DEPLOYMENT_NAME, AutoscalingSettings, PoolSettings, parse_pool_settings
from encoder.errors import EncoderError, InvalidInput, NotReady, Overloaded
from encoder.memory import keep_little, searching_seldom
from encoder.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    from deployments.service import EncoderCore

logger = logging.getLogger("ray.serve")
Response = TypeVar("Response")

STARTUP_NAMESPACE = "vitfleet-startup"
# A report takes milliseconds; a replica that does not answer is named, within what the caller still waits.
REPORT_TIMEOUT_S = 3.0
REPORT_SHARE = 0.8


class FailedStream(Exception):
    """Ends a stream whose status is set already; one line, no traceback of its own."""


class PoolReplica:
    """One replica; its methods are the RPCs of encoder.v1.EncoderService."""

    async def __init__(self, settings: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        self._settings = parse_pool_settings(settings)
        context = serve.get_replica_context()
        self._identity = wire.ReplicaIdentity(
            pool=self._settings.name,
            replica=context.replica_id.unique_id,
            node=ray.get_runtime_context().get_node_id(),
            host=socket.gethostname(),
            pid=os.getpid(),
        )
        if context.app_name != self._settings.name:
            raise InvalidInput(
                f"application {context.app_name!r} runs a pool named {self._settings.name!r}: give both one name, "
                "since calls find their pool by it"
            )
        # Pillow tells stderr of each corrupt EXIF block; a filter for one request would not be thread-safe.
        warnings.filterwarnings("ignore", module=r"PIL\.")
        self._core: EncoderCore = await self._start()

    async def EncodeImages(
        self, request: pb.EncodeImagesRequest, grpc_context: RayServegRPCContext
    ) -> pb.EncodeImagesResponse:
        return await self._answer(
            grpc_context, pb.EncodeImagesResponse, lambda deadline: self._core.encode_images(request, deadline)
        )

    async def EncodeText(
        self, request: pb.EncodeTextRequest, grpc_context: RayServegRPCContext
    ) -> pb.EncodeTextResponse:
        return await self._answer(
            grpc_context, pb.EncodeTextResponse, lambda deadline: self._core.encode_text(request, deadline)
        )

    async def EncodeStream(
        self, requests: gRPCInputStream, grpc_context: RayServegRPCContext
    ) -> AsyncIterator[pb.EncodeStreamResponse]:
        try:
            async for response in self._core.encode_stream(requests, _deadline(grpc_context)):
                yield response
        except Exception as error:
            failure = self._fail(grpc_context, error)
            raise FailedStream(failure.details) from None

    async def ListModels(
        self, request: pb.ListModelsRequest, grpc_context: RayServegRPCContext
    ) -> pb.ListModelsResponse:
        return self._core.list_models()

    async def GetModel(self, request: pb.GetModelRequest, grpc_context: RayServegRPCContext) -> pb.GetModelResponse:
        async def get_model(_: float | None) -> pb.GetModelResponse:
            return self._core.get_model(request)

        return await self._answer(grpc_context, pb.GetModelResponse, get_model)

    async def GetBackendReport(
        self, request: pb.GetBackendReportRequest, grpc_context: RayServegRPCContext
    ) -> pb.GetBackendReportResponse:
        async def get_backend_report(deadline: float | None) -> pb.GetBackendReportResponse:
            self._core.check_pool(request.pool)
            if deadline is None:
                return await self._pool_report(REPORT_TIMEOUT_S)
            remaining_s = max(0.0, deadline - asyncio.get_running_loop().time())
            return await self._pool_report(min(REPORT_TIMEOUT_S, REPORT_SHARE * remaining_s))

        return await self._answer(grpc_context, pb.GetBackendReportResponse, get_backend_report)

    async def describe(self) -> bytes:
        """This replica's report, serialised; the replica that was asked for the pool's report calls it on all."""
        return self._core.replica_report().SerializeToString()

    async def record_autoscaling_stats(self) -> dict[str, float]:
        """Called by Serve every second or so when the pool scales; `deployments.scaling` decides by it."""
        return {QUEUE_AGE_KEY: self._core.queue_age_s()}

    async def check_health(self) -> None:
        """Called by Serve: a real forward has to finish in time, or the replica is replaced."""
        await self._core.check_health()

    async def __del__(self) -> None:
        """Called by Serve once, after the replica has drained."""
        core = getattr(self, "_core", None)
        if core is not None:
            await core.close()

    async def _start(self) -> "EncoderCore":
        keep_little()
        with searching_seldom(), nothing_for_training():
            # Imported here: whoever builds the application needs no torch.
            from deployments.service import EncoderCore
            from encoder.engine import Engine

            gc.freeze()  # modules stay: what Serve searches through before a replica is ready is then the less
            loop = asyncio.get_running_loop()
            try:
                engine = await loop.run_in_executor(
                    None, Engine.load, self._settings.engine_on_its_cpus, self._publish_stage
                )
            except EncoderError as error:
                self._publish_stage(FAILED_STAGE + wire.one_line(str(error)))
                raise
        engine.start_decoders(self._settings.decode_threads)
        core = EncoderCore(engine, self._settings, self._identity)
        internal_kv._internal_kv_del(self._startup_key, namespace=STARTUP_NAMESPACE)
        logger.info("pool=%s replica=%s is ready", self._identity.pool, self._identity.replica)
        return core

    @property
    def _startup_key(self) -> str:
        return f"{self._identity.pool}/{self._identity.replica}"

    def _publish_stage(self, stage: str) -> None:
        """Logs a start-up stage, and leaves it where whoever waits for the pool can read it."""
        logger.info("pool=%s replica=%s stage=%r", self._identity.pool, self._identity.replica, stage)
        internal_kv._internal_kv_put(self._startup_key, stage, overwrite=True, namespace=STARTUP_NAMESPACE)

    async def _answer(
        self,
        context: RayServegRPCContext,
        empty: Callable[[], Response],
        compute: Callable[[float | None], Awaitable[Response]],
    ) -> Response:
        try:
            return await compute(_deadline(context))
        except Exception as error:
            self._fail(context, error)
            return empty()

    def _fail(self, context: RayServegRPCContext, error: Exception) -> wire.CallFailure:
        """Sets the call's status; an error that is not the project's own goes to the log, not to the client."""
        if not isinstance(error, EncoderError):
            logger.error("pool=%s a call failed", self._identity.pool, exc_info=error)
        failure = wire.call_failure(error, self._core.retry_after_s() if isinstance(error, Overloaded) else None)
        context.set_code(failure.code)
        context.set_details(failure.details)
        # Serve types metadata as text; a `-bin` key takes bytes.
        context.set_trailing_metadata(cast(list[tuple[str, str]], list(failure.trailing_metadata)))
        return failure

    async def _pool_report(self, timeout_s: float) -> pb.GetBackendReportResponse:
        """The reports of all replicas of this pool. `unreachable` tells of those that do not answer in time; Serve then
        hands out no others either, and the answer holds this replica's own.
        """
        answer = pb.GetBackendReportResponse()
        handle = serve.get_deployment_handle(DEPLOYMENT_NAME, self._identity.pool)
        try:
            results = await handle.broadcast("describe").results_async(timeout_s=timeout_s, return_exceptions=True)
        except Exception as error:
            results = [error]
        for result in results:
            if isinstance(result, bytes):
                answer.replicas.append(pb.ReplicaReport.FromString(result))
                continue
            logger.warning("pool=%s a replica gave no report", self._identity.pool, exc_info=result)
            status = wire.status_of(NotReady(f"a replica of pool {self._identity.pool!r} gave no report: ask again"))
            answer.unreachable.append(pb.PoolError(pool=self._identity.pool, error=status))
        if self._identity.replica not in {report.replica for report in answer.replicas}:
            answer.replicas.append(self._core.replica_report())
        return answer


def _deadline(context: RayServegRPCContext) -> float | None:
    """The caller's deadline on the running loop's clock; raises InvalidInput when its metadata is no number."""
    remaining_s = wire.timeout_s(context.invocation_metadata())
    return None if remaining_s is None else asyncio.get_running_loop().time() + remaining_s


def _autoscaling(settings: AutoscalingSettings) -> dict[str, Any]:
    """Serve's autoscaling config."""
    config = settings.model_dump(exclude_none=True)
    target_s = config.pop("target_queue_age_s", None)
    if target_s is not None:
        kwargs = {"target_queue_age_s": target_s}
        config["policy"] = {"policy_function": "deployments.scaling:QueueAgePolicy", "policy_kwargs": kwargs}
    return config


def pool_deployment(settings: PoolSettings) -> serve.Deployment:
    """The Serve deployment that a pool's settings ask for."""
    actor: dict[str, Any] = {"num_cpus": settings.num_cpus, "num_gpus": settings.num_gpus}
    if settings.resources:
        actor["resources"] = dict(settings.resources)
    if settings.accelerator_type is not None:
        actor["accelerator_type"] = settings.accelerator_type
    if settings.label_selector:
        actor["label_selector"] = dict(settings.label_selector)
    size: dict[str, Any] = {"num_replicas": settings.num_replicas or 1}
    if settings.autoscaling is not None:
        size = {"autoscaling_config": _autoscaling(settings.autoscaling)}
    return serve.deployment(
        name=DEPLOYMENT_NAME,
        ray_actor_options=actor,
        max_ongoing_requests=settings.max_ongoing_requests,
        max_queued_requests=settings.max_queued_requests,
        health_check_period_s=settings.health_period_s,
        health_check_timeout_s=settings.health_forward_timeout_s + 5.0,
        graceful_shutdown_timeout_s=settings.drain_timeout_s,
        graceful_shutdown_wait_loop_s=0.2,
        max_constructor_retry_count=3,
        logging_config={"enable_access_log": False},
        **size,
    )(PoolReplica)
