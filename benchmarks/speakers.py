"""How a load's client asks: raw gRPC with bytes that were serialised ahead, or an OpenAI-like HTTP API."""

import base64
import json
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import aiohttp
import grpc
import grpc.aio
import numpy as np

from benchmarks.plan import Plan
from encoder.v1 import encoder_pb2 as pb

TIMEOUT_S = 120.0
PICTURES = 64
LARGE_PIXELS = 1_000_000
LIMIT_BYTES = 256 * 2**20
SERVICE = "/encoder.v1.EncoderService/"
STAGES = ("preprocess_ms", "queue_ms", "forward_ms", "finish_ms", "total_ms", "batch_size")


@dataclass(frozen=True)
class Answer:
    """Items that came with a vector, and where the service says that the time went."""

    items: int
    stages: dict[str, float]


class BadAnswer(Exception):
    """An answer without a vector for each item."""


class Speaker(Protocol):
    """One client's connection."""

    async def ask(self, request: bytes) -> Answer: ...


class GrpcSpeaker:
    """A connection to a router, or with `application` metadata to Serve itself."""

    def __init__(self, channel: grpc.aio.Channel, plan: Plan) -> None:
        method = "EncodeText" if plan.kind == "text" else "EncodeImages"
        self._parse = (pb.EncodeTextResponse if plan.kind == "text" else pb.EncodeImagesResponse).FromString
        self._call = channel.unary_unary(SERVICE + method)
        self._metadata = (("application", plan.application),) if plan.application else None
        self._items = plan.items

    async def ask(self, request: bytes) -> Answer:
        response = self._parse(await self._call(request, timeout=TIMEOUT_S, metadata=self._metadata))
        vectors = [np.frombuffer(result.embedding.values, dtype="<f4") for result in response.results]
        if len(vectors) != self._items or not all(len(vector) for vector in vectors):
            failed = next((result.error.message for result in response.results if result.error.message), "no vector")
            raise BadAnswer(failed)
        return Answer(len(vectors), {stage: float(getattr(response.timings, stage)) for stage in STAGES})


class HttpSpeaker:
    """A connection to a server with OpenAI's embeddings route."""

    def __init__(self, session: aiohttp.ClientSession, plan: Plan) -> None:
        self._session, self._items = session, plan.items
        self._url = f"http://{plan.address}/embeddings"

    async def ask(self, request: bytes) -> Answer:
        headers = {"Content-Type": "application/json"}
        async with self._session.post(self._url, data=request, headers=headers) as response:
            body = await response.read()
            if response.status != 200:
                raise BadAnswer(f"HTTP {response.status}: {body[:200].decode(errors='replace')}")
        rows = json.loads(body)["data"]
        vectors = [np.frombuffer(base64.b64decode(row["embedding"]), dtype="<f4") for row in rows]
        if len(vectors) != self._items or not all(len(vector) for vector in vectors):
            raise BadAnswer(f"{len(vectors)} vectors for {self._items} items")
        return Answer(len(vectors), {})


@asynccontextmanager
async def connect(plan: Plan) -> AsyncIterator[Sequence[Speaker]]:
    """A speaker for each client; open arrivals share eight."""
    count = 8 if plan.rate else plan.clients
    async with AsyncExitStack() as stack:
        if plan.protocol == "http":
            session = await stack.enter_async_context(
                aiohttp.ClientSession(
                    connector=aiohttp.TCPConnector(limit=0), timeout=aiohttp.ClientTimeout(total=TIMEOUT_S)
                )
            )
            yield [HttpSpeaker(session, plan) for _ in range(count)]
            return
        options = (
            ("grpc.use_local_subchannel_pool", 1),
            ("grpc.max_send_message_length", LIMIT_BYTES),
            ("grpc.max_receive_message_length", LIMIT_BYTES),
        )
        channels = [
            await stack.enter_async_context(grpc.aio.insecure_channel(plan.address, options)) for _ in range(count)
        ]
        yield [GrpcSpeaker(channel, plan) for channel in channels]


def requests_of(plan: Plan) -> list[bytes]:
    """Serialised requests that differ, to be sent in turns."""
    if plan.payload:
        noise = np.random.default_rng(0).bytes(plan.payload)
        return [pb.EncodeImagesRequest(images=[pb.Image(encoded=noise)]).SerializeToString()]
    items = contents(plan.kind, plan.width, plan.height)
    count = max(1, len(items) // plan.items)
    groups = [[items[(start * plan.items + i) % len(items)] for i in range(plan.items)] for start in range(count)]
    return [_serialised(plan, group) for group in groups]


@cache
def contents(kind: str, width: int, height: int) -> list[bytes]:
    """JPEG files, or texts in UTF-8; of large pictures only two, which take seconds to draw."""
    from benchmarks.subjects import captions, jpegs

    if kind == "text":
        return [text.encode() for text in captions(PICTURES)]
    return jpegs(2 if width * height > LARGE_PIXELS else PICTURES, width, height)


def _serialised(plan: Plan, group: Sequence[bytes]) -> bytes:
    if plan.protocol == "grpc":
        if plan.kind == "text":
            return pb.EncodeTextRequest(texts=[text.decode() for text in group]).SerializeToString()
        return pb.EncodeImagesRequest(images=[pb.Image(encoded=picture) for picture in group]).SerializeToString()
    given = [
        text.decode() if plan.kind == "text" else f"data:image/jpeg;base64,{base64.b64encode(text).decode()}"
        for text in group
    ]
    body = {"model": plan.model, "input": given, "modality": plan.kind, "encoding_format": "base64"}
    return json.dumps(body).encode()
