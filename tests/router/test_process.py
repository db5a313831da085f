"""The router as a process of its own, and what it imports."""

import asyncio
import json
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from encoder.v1 import encoder_pb2_grpc

from .fake_pool import FakePool, PoolServer
from .harness import eventually, failure_of, images, settings_for

ROOT = Path(__file__).parents[2]
HEAVY = ("torch", "ray", "transformers", "PIL", "openvino", "tokenizers")


def test_the_router_imports_nothing_heavy() -> None:
    code = f"import sys, deployments.router.main; print([name for name in {HEAVY!r} if name in sys.modules])"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60, check=True
    )
    assert done.stdout.strip() == "[]"


@asynccontextmanager
async def router_process(arguments: list[str]) -> AsyncIterator[tuple[asyncio.subprocess.Process, str]]:
    """The process and the address it listens on."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "deployments.router", *arguments,
        cwd=ROOT, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = (await asyncio.wait_for(process.stdout.readline(), 60)).decode()
        assert line.startswith("listening on ")
        yield process, line.removeprefix("listening on ").strip()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()


@pytest.mark.parametrize("how", ["file", "json"])
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_it_serves_and_ends_in_order(tmp_path: Path, how: str, number: signal.Signals) -> None:
    pool = FakePool("vision-cpu")
    async with PoolServer([pool]) as server:
        values = settings_for([{"name": "vision-cpu", "address": server.address}]).model_dump_json()
        if how == "file":
            (tmp_path / "router.yaml").write_text(values)
            arguments = ["--config", str(tmp_path / "router.yaml")]
        else:
            arguments = ["--settings", values]
        async with router_process(arguments) as (process, address), grpc.aio.insecure_channel(address) as channel:
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest())
            while (await asyncio.wait_for(watch.read(), 30)).status != health_pb2.HealthCheckResponse.SERVING:
                pass
            stub = encoder_pb2_grpc.EncoderServiceStub(channel)
            pool.released.clear()
            under_way = stub.EncodeImages(images(b"x"), timeout=30)
            await eventually(lambda: pool.in_flight == 1)
            process.send_signal(number)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            error = await failure_of(_refused(stub))
            assert error.code() is grpc.StatusCode.UNAVAILABLE
            assert process.returncode is None
            pool.released.set()
            assert (await under_way).results[0].HasField("embedding")
            assert await asyncio.wait_for(process.wait(), 30) == 0
            assert process.stderr is not None
            logged = [json.loads(line) for line in (await process.stderr.read()).decode().splitlines()]
            # Quiet by default: of a good life, at most that it stopped serving is told.
            assert {line["event"] for line in logged} <= {"not_serving", "pool_not_healthy"}


async def _refused(stub: encoder_pb2_grpc.EncoderServiceStub) -> None:
    for _ in range(1000):
        await stub.EncodeImages(images(), timeout=10)


async def test_a_second_signal_ends_it_at_once() -> None:
    pool = FakePool("vision-cpu")
    async with PoolServer([pool]) as server:
        target = {"name": "vision-cpu", "address": server.address}
        values = settings_for([target], drain={"grace_s": 600.0}).model_dump_json()
        async with (
            router_process(["--settings", values]) as (process, address),
            grpc.aio.insecure_channel(address) as channel,
        ):
            health = health_pb2_grpc.HealthStub(channel)
            watch = health.Watch(health_pb2.HealthCheckRequest())
            while (await asyncio.wait_for(watch.read(), 30)).status != health_pb2.HealthCheckResponse.SERVING:
                pass
            pool.released.clear()
            stub = encoder_pb2_grpc.EncoderServiceStub(channel)
            call = stub.EncodeImages(images(b"x"), timeout=60)
            await eventually(lambda: pool.in_flight == 1)
            process.send_signal(signal.SIGTERM)
            assert (await watch.read()).status == health_pb2.HealthCheckResponse.NOT_SERVING
            await asyncio.sleep(0.3)
            assert process.returncode is None
            process.send_signal(signal.SIGTERM)
            assert await asyncio.wait_for(process.wait(), 30) == 0
            assert (await failure_of(call)).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--settings", '{"pools": [], "prot": 1}'], "prot"),
        (["--settings", "nonsense"], "--settings"),
        (["--config", "/nowhere/router.yaml"], "/nowhere/router.yaml"),
    ],
)
def test_bad_settings_end_it_with_one_line(arguments: list[str], told: str) -> None:
    command = [sys.executable, "-m", "deployments.router", *arguments]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert told in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
