"""Patch features of a real tower, over sockets, through the router: transformers' own, in calls and in streams."""

import io
from collections.abc import AsyncIterator, Iterator
from contextlib import aclosing, asynccontextmanager

import grpc
import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPVisionModelWithProjection

from deployments import wire
from deployments.service import EncoderCore
from deployments.settings import parse_pool_settings
from encoder.client import AsyncEncoderClient, ServiceError
from encoder.demo import demo_model_path
from encoder.engine import Engine
from encoder.settings import parse_engine_settings
from encoder.v1 import encoder_pb2 as pb
from encoder.v1 import encoder_pb2_grpc
from tests.deployments.plain_server import Servicer

from .harness import Fleet, eventually, fleet

SIZES = ((64, 64), (100, 70), (40, 90), (200, 33), (64, 65))


def pictures() -> list[bytes]:
    rng = np.random.default_rng(5)
    encoded = []
    for height, width in SIZES:
        stream = io.BytesIO()
        small = Image.fromarray(rng.integers(0, 256, (5, 5, 3), dtype=np.uint8))
        small.resize((width, height), Image.Resampling.BICUBIC).save(stream, "PNG")
        encoded.append(stream.getvalue())
    return encoded


@pytest.fixture
def engine() -> Iterator[Engine]:
    settings = {"model": "demo", "dtype": "float32", "runner": "openvino", "buckets": [1, 4], "threads": 1}
    loaded = Engine.load(parse_engine_settings(settings))
    yield loaded
    loaded.close()


@pytest.fixture
def expected(engine: Engine) -> np.ndarray:
    """[5, t, F]: the last layer without the class token."""
    model = CLIPVisionModelWithProjection.from_pretrained(demo_model_path(), attn_implementation="eager").eval()
    pixels = engine._tower.collate([engine.prepare_image(data) for data in pictures()])["pixel_values"]
    with torch.inference_mode():
        return model(pixel_values=pixels).last_hidden_state[:, 1:].numpy()


@asynccontextmanager
async def served(engine: Engine, **settings: object) -> AsyncIterator[tuple[Fleet, AsyncEncoderClient]]:
    """A router in front of one pool, and a client of the router."""
    identity = wire.ReplicaIdentity(pool="vision", replica="vision-0", node="n", host="h", pid=1)
    core = EncoderCore(engine, parse_pool_settings({"name": "vision", "engine": {}, **settings}), identity)
    server = grpc.aio.server()
    encoder_pb2_grpc.add_EncoderServiceServicer_to_server(Servicer(core), server)
    target = {"name": "vision", "address": f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"}
    await server.start()
    try:
        async with fleet(extra=[target], wait=False, health={"timeout_s": 60.0}) as started:
            await eventually(lambda: started.state("vision").healthy, seconds=60)
            async with AsyncEncoderClient(f"127.0.0.1:{started.router.port}", batch_size=3) as client:
                yield started, client
    finally:
        await server.stop(None)
        await core.close()


async def test_calls_and_streams_give_transformers_features(engine: Engine, expected: np.ndarray) -> None:
    async with served(engine) as (_, client):
        called = await client.encode_images(pictures(), output="tokens")
        half = await client.encode_images(pictures()[:1], output="tokens", dtype="float16")
        streamed = {}
        async with aclosing(client.encode_stream(pictures(), output="tokens")) as stream:
            async for result in stream:
                streamed[result.index] = result.features
        (model,) = await client.list_models()
    side = round(len(expected[0]) ** 0.5)
    for index, wanted in enumerate(expected):
        for found in (called[index], streamed[index]):
            assert found.grid == (side, side) and np.abs(found.values - wanted).max() <= 2e-5
    assert half[0].values.dtype == np.float16 and np.abs(half[0].values - expected[0]).max() <= 5e-3
    (tower,) = model.towers
    assert list(tower.output_kinds) == [pb.OUTPUT_KIND_POOLED, pb.OUTPUT_KIND_TOKENS]
    assert tower.token_dimensions == expected.shape[2] and "class token left out" in tower.token_features


async def test_a_refusal_names_its_reason_through_the_router(engine: Engine, expected: np.ndarray) -> None:
    one = expected[0].nbytes + 64
    async with served(engine, max_response_bytes=max(8192, 4096 + 2 * one)) as (_, client):
        fitting = max(4096, 2 * one) // one
        client._batch_size = fitting + 1
        with pytest.raises(ServiceError) as failed:
            await client.encode_images([pictures()[0]] * (fitting + 1), output="tokens")
        assert len(await client.encode_images([pictures()[0]] * fitting, output="tokens")) == fitting
    assert failed.value.code == "INVALID_ARGUMENT" and f"at most {fitting} of this size fit" in failed.value.message
