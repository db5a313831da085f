"""The router in front of real engines with the demo model: which of them may share an index, and which may not."""

import dataclasses
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager

import grpc
import numpy as np
import pytest

from deployments import wire
from deployments.service import EncoderCore
from deployments.settings import parse_pool_settings
from encoder.attention.backend import AttentionCall
from encoder.engine import Engine
from encoder.settings import parse_engine_settings
from encoder.v1 import encoder_pb2 as pb
from encoder.v1 import encoder_pb2_grpc
from tests.deployments.plain_server import Servicer

from .harness import Fleet, eventually, failure_of, fleet, numbers, texts

Code = grpc.StatusCode
QUICK = {"runner": "eager", "buckets": [1, 4], "threads": 1, "self_check": False}


def load(**settings: object) -> Engine:
    return Engine.load(parse_engine_settings({"model": "demo", "dtype": "float32", **QUICK, **settings}))


def without_masks(engine: Engine) -> Engine:
    """An engine whose attention drops every mask it is given, as a backend does that swallows an argument."""
    backend = engine._dispatcher._backend
    attend = backend.attend

    def lossy(call: AttentionCall) -> object:
        return attend(dataclasses.replace(call, mask=None, is_causal=False))

    backend.attend = lossy
    return engine


@pytest.fixture(scope="module")
def engines() -> Iterator[dict[str, Engine]]:
    loaded = {
        "vision-fp32": load(tower="vision"),
        "vision-bf16": load(tower="vision", dtype="bfloat16"),
        "vision-pil": load(tower="vision", preprocess="pil"),
        "text-fp32": load(tower="text"),
        "text-bf16": load(tower="text", dtype="bfloat16"),
        "text-lossy": without_masks(load(tower="text")),
    }
    yield loaded
    for engine in loaded.values():
        engine.close()


@asynccontextmanager
async def fleet_of(engines: dict[str, Engine], *names: str) -> AsyncIterator[Fleet]:
    """A router in front of these engines, one pool each."""
    async with AsyncExitStack() as stack:
        targets = []
        for name in names:
            identity = wire.ReplicaIdentity(pool=name, replica=f"{name}-0", node="n", host="h", pid=1)
            core = EncoderCore(engines[name], parse_pool_settings({"name": name, "engine": {}}), identity)
            server = grpc.aio.server()
            encoder_pb2_grpc.add_EncoderServiceServicer_to_server(Servicer(core), server)
            targets.append({"name": name, "address": f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"})
            await server.start()
            stack.push_async_callback(core.close)
            stack.push_async_callback(server.stop, None)
        health = {"timeout_s": 60.0}
        agreement = {"settle_s": 60.0, "timeout_s": 60.0}
        started = await stack.enter_async_context(fleet(extra=targets, wait=False, health=health, agreement=agreement))
        await eventually(lambda: all(started.state(name).healthy for name in names), seconds=120)
        yield started


async def cosines(started: Fleet) -> dict[tuple[str, str], float]:
    report = await started.stub.GetBackendReport(pb.GetBackendReportRequest(), timeout=60)
    return {(one.pool_a, one.pool_b): one.worst_cosine for one in report.agreement}


async def test_numeric_types_share_an_index(engines: dict[str, Engine]) -> None:
    names = ("vision-bf16", "vision-fp32", "text-bf16", "text-fp32")
    async with fleet_of(engines, *names) as started:
        assert not any(started.state(name).quarantine for name in names)
        found = await cosines(started)
        assert found.keys() == {("vision-bf16", "vision-fp32"), ("text-bf16", "text-fp32")}
        # They differ, by less than it takes to tell two pictures apart.
        assert all(0.999 < cosine < 1.0 - 1e-9 for cosine in found.values())


async def test_another_preprocessing_is_another_index(engines: dict[str, Engine]) -> None:
    async with fleet_of(engines, "vision-pil", "vision-fp32", "vision-bf16") as started:
        assert "fingerprint" in started.state("vision-pil").quarantine
        assert not started.state("vision-fp32").quarantine


async def test_a_text_tower_that_loses_its_masks_is_kept_out(engines: dict[str, Engine]) -> None:
    async with fleet_of(engines, "text-lossy", "text-fp32", "text-bf16") as started:
        found = await cosines(started)
        assert found["text-lossy", "text-fp32"] < 0.9
        assert "text-lossy" in {name for name in started.router.pools.by_name if started.state(name).quarantine}
        error = await failure_of(started.stub.EncodeText(texts("a red circle", pool="text-lossy"), timeout=60))
        assert error.code() is Code.FAILED_PRECONDITION
        # What is served is what the sound tower computes.
        answer = await started.stub.EncodeText(texts("a red circle", "two blue squares"), timeout=60)
        items = [engines["text-fp32"].prepare_text(text) for text in ("a red circle", "two blue squares")]
        expected = engines["text-fp32"].forward(items).vectors
        for result, vector in zip(answer.results, expected, strict=True):
            cosine = float(numbers(result.embedding) @ vector / np.linalg.norm(vector))
            assert cosine > 0.999
