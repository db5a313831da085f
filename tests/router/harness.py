"""A router in front of fake pools, with real sockets between client, router and pools."""

import asyncio
import time
import urllib.request
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import grpc
import numpy as np
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deployments.router.server import Router
from deployments.router.settings import RouterSettings, parse_settings
from encoder.v1 import encoder_pb2 as pb
from encoder.v1 import encoder_pb2_grpc

from .fake_pool import FakePool, PoolServer

NOWHERE = "127.0.0.1:1"


class Fleet:
    """What a test talks to."""

    def __init__(self, router: Router, servers: dict[str, PoolServer], channel: grpc.aio.Channel) -> None:
        self.router = router
        self.servers = servers
        self.channel = channel
        self.stub = encoder_pb2_grpc.EncoderServiceStub(channel)
        self.health = health_pb2_grpc.HealthStub(channel)

    async def status(self, service: str = "") -> int:
        """A health_pb2.HealthCheckResponse.ServingStatus."""
        answer = await self.health.Check(health_pb2.HealthCheckRequest(service=service), timeout=5)
        return answer.status

    def state(self, pool: str) -> Any:
        """The router's own Pool."""
        return self.router.pools.by_name[pool]

    async def until_healthy(self, *pools: str) -> None:
        await eventually(lambda: all(self.state(pool).healthy for pool in pools))


def settings_for(targets: Sequence[dict[str, object]], **overrides: Any) -> RouterSettings:
    """Settings with short times."""
    values: dict[str, Any] = {
        "port": 0,
        "pools": list(targets),
        "health": {"interval_s": 0.2, "timeout_s": 1.0, "recheck_s": 0.05, "refresh_s": 60.0},
        "retry": {"backoff_s": 0.01},
        "drain": {"notice_s": 0.0, "grace_s": 10.0},
        "agreement": {"settle_s": 0.2, "recheck_s": 0.1, "timeout_s": 5.0},
        "connection": {"reconnect_max_s": 0.1},
    }
    for key, value in overrides.items():
        values[key] = values[key] | value if isinstance(value, dict) and key in values else value
    return parse_settings(values)


@asynccontextmanager
async def fleet(
    *pools: FakePool,
    towers: bool = False,
    extra: Sequence[dict[str, object]] = (),
    wait: bool = True,
    own_address: bool = True,
    credentials: grpc.ChannelCredentials | None = None,
    **overrides: Any,
) -> AsyncIterator[Fleet]:
    """Starts the pools (each at an address of its own, or all at one) and a router that knows them.

    `towers`: the settings say what each serves; else the router asks. `extra`: targets that nobody serves. `wait`:
    until all pools are healthy. `credentials`: of the client's channel.
    """
    async with AsyncExitStack() as stack:
        servers: dict[str, PoolServer] = {}
        if own_address:
            for pool in pools:
                servers[pool.name] = await stack.enter_async_context(PoolServer([pool]))
        elif pools:
            shared = await stack.enter_async_context(PoolServer(pools))
            servers = {pool.name: shared for pool in pools}
        targets: list[dict[str, object]] = [
            {
                "name": pool.name,
                "address": servers[pool.name].address,
                "towers": [pool.tower] if towers else [],
            }
            for pool in pools
        ]
        router = Router(settings_for([*targets, *extra], **overrides))
        stack.push_async_callback(router.stop)
        await router.start()
        # A test's own message size is not what is under test.
        options = (("grpc.max_receive_message_length", -1),)
        address = f"127.0.0.1:{router.port}"
        if credentials is None:
            opened = grpc.aio.insecure_channel(address, options=options)
        else:
            opened = grpc.aio.secure_channel(address, credentials, options=options)
        channel = await stack.enter_async_context(opened)
        started = Fleet(router, servers, channel)
        if wait:
            await started.until_healthy(*(pool.name for pool in pools))
        yield started


async def eventually(condition: Callable[[], bool], seconds: float = 20.0) -> None:
    """Waits until `condition` holds; fails when it does not within `seconds`."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "the awaited condition never held"
        await asyncio.sleep(0.01)


async def scrape(started: Fleet) -> dict[str, float]:
    """The router's metrics over HTTP, by name and labels without the common prefix."""

    def get() -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{started.router.metrics_port}/metrics") as answer:
            return str(answer.read().decode())

    lines = [line for line in (await asyncio.to_thread(get)).splitlines() if not line.startswith("#")]
    return {
        name.removeprefix("vitfleet_router_"): float(value) for name, value in (line.rsplit(" ", 1) for line in lines)
    }


async def failure_of(call: Any) -> grpc.aio.AioRpcError:
    """The error that `call` ends with."""
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error
    raise AssertionError("the call succeeded, but should have failed")


def images(*contents: bytes, **options: Any) -> pb.EncodeImagesRequest:
    request = pb.EncodeImagesRequest(images=[pb.Image(encoded=content) for content in contents])
    if options:
        request.options.CopyFrom(pb.EncodeOptions(**options))
    return request


def texts(*contents: str, **options: Any) -> pb.EncodeTextRequest:
    request = pb.EncodeTextRequest(texts=contents)
    if options:
        request.options.CopyFrom(pb.EncodeOptions(**options))
    return request


def numbers(embedding: pb.Embedding) -> np.ndarray:
    return np.frombuffer(embedding.values, dtype="<f4")
