"""EncoderCore behind a plain grpc.aio server: what a client sees of it without Ray."""

import asyncio
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from typing import TypeVar

import grpc

from deployments import wire
from deployments.service import EncoderCore
from deployments.settings import PoolSettings, parse_pool_settings
from encoder.errors import Overloaded
from encoder.v1 import encoder_pb2 as pb
from encoder.v1 import encoder_pb2_grpc
from tests.deployments.formula import FormulaEngine

Response = TypeVar("Response")
IDENTITY = wire.ReplicaIdentity(pool="vision-cpu", replica="r-1", node="n-1", host="h-1", pid=42)


class Servicer(encoder_pb2_grpc.EncoderServiceServicer):
    def __init__(self, core: EncoderCore) -> None:
        self.core = core

    async def EncodeImages(self, request, context):
        return await self._answer(context, self.core.encode_images(request, _deadline(context)))

    async def EncodeText(self, request, context):
        return await self._answer(context, self.core.encode_text(request, _deadline(context)))

    async def EncodeStream(self, request_iterator, context):
        try:
            async for response in self.core.encode_stream(request_iterator, _deadline(context)):
                yield response
        except Exception as error:
            await self._abort(context, error)

    async def ListModels(self, request, context):
        return self.core.list_models()

    async def GetModel(self, request, context):
        return await self._answer(context, _call(self.core.get_model, request))

    async def GetBackendReport(self, request, context):
        return await self._answer(context, _call(self.core.get_backend_report, request))

    async def _answer(self, context: grpc.aio.ServicerContext, answer: Awaitable[Response]) -> Response:
        try:
            return await answer
        except Exception as error:
            await self._abort(context, error)
            raise

    async def _abort(self, context: grpc.aio.ServicerContext, error: Exception) -> None:
        failure = wire.call_failure(error, self.core.retry_after_s() if isinstance(error, Overloaded) else None)
        await context.abort(failure.code, failure.details, failure.trailing_metadata)


async def _call(function, request):
    return function(request)


def _deadline(context: grpc.aio.ServicerContext) -> float | None:
    remaining_s = wire.timeout_s(context.invocation_metadata())
    return None if remaining_s is None else asyncio.get_running_loop().time() + remaining_s


def pool_settings(**changes: object) -> PoolSettings:
    return parse_pool_settings({"name": "vision-cpu", "engine": {}, "decode_threads": 1, **changes})


@asynccontextmanager
async def serving(
    engine: FormulaEngine, **changes: object
) -> AsyncIterator[tuple[encoder_pb2_grpc.EncoderServiceStub, EncoderCore]]:
    """A client of, and the core behind, a server on loopback."""
    core = EncoderCore(engine, pool_settings(**changes), IDENTITY)
    server = grpc.aio.server()
    encoder_pb2_grpc.add_EncoderServiceServicer_to_server(Servicer(core), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        try:
            yield encoder_pb2_grpc.EncoderServiceStub(channel), core
        finally:
            engine.gate.set()
            engine.decode_gate.set()
            await server.stop(None)
            await core.close()


def images(*sources: bytes, **options: object) -> pb.EncodeImagesRequest:
    return pb.EncodeImagesRequest(
        images=[pb.Image(encoded=source) for source in sources], options=pb.EncodeOptions(**options)
    )
