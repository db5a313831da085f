"""The pools as the router knows them: connections, what they serve, whether they are healthy, how fast they are."""

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping

import grpc

from deployments.router.calls import Metadata
from deployments.router.envelope import first_outcome
from deployments.router.pick import PoolView
from deployments.router.settings import ConnectionSettings, PoolTarget, RouterSettings
from deployments.router.speed import Speed
from encoder.settings import TowerName
from encoder.v1 import encoder_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["EncoderService"].full_name
ENCODE_METHODS: Mapping[TowerName, str] = {"vision": "EncodeImages", "text": "EncodeText"}
_METHODS = (*ENCODE_METHODS.values(), "ListModels", "GetBackendReport")
_RECONNECT_FIRST_MS = 100
_CONNECT_TIMEOUT_MS = 5000


class Pool:
    """One pool. Changed by the router's event loop alone."""

    def __init__(self, target: PoolTarget, settings: RouterSettings) -> None:
        self.name = target.name
        self.address = target.address
        self.healthy = False
        self.reason = "not probed yet"
        self.declared: frozenset[str] | None = frozenset(target.towers) or None
        # Models by tower, and the size of a full vector by tower, as the pool says; None until it was asked.
        self.models: Mapping[str, frozenset[str]] | None = None
        self.dimensions: Mapping[str, int] = {}
        self.speed = Speed(time.monotonic())
        # When an embedding came back last, probe or not (time.monotonic()).
        self.last_embedding = float("-inf")
        # Set when a call failed in a way that speaks against the pool.
        self.doubted = asyncio.Event()
        self._channels = [_open_channel(target.address, settings) for _ in range(settings.connection.per_pool)]
        self._lanes: Iterator[dict[str, grpc.aio.UnaryUnaryMultiCallable]] = itertools.cycle(
            [{name: channel.unary_unary(f"/{SERVICE}/{name}") for name in _METHODS} for channel in self._channels]
        )

    @property
    def towers(self) -> frozenset[str] | None:
        """What the settings say it serves, else what it says itself; None until that is known."""
        if self.declared is not None:
            return self.declared
        return frozenset(self.models) if self.models is not None else None

    def view(self, now: float) -> PoolView:
        """How the pool stands, for `pick`."""
        speed = self.speed
        return PoolView(
            self.name,
            self.towers,
            self.models,
            self.healthy,
            speed.in_flight,
            speed.items_per_second(),
            speed.ceiling(now),
        )

    async def ask(self, method: str, request: bytes, timeout_s: float, metadata: Metadata) -> bytes:
        """One unary call, bytes in and bytes out; raises grpc.aio.AioRpcError. Cancelling this cancels the call."""
        response: bytes = await next(self._lanes)[method](request, timeout=timeout_s, metadata=metadata)
        return response

    async def encode(self, tower: TowerName, request: bytes, items: int, timeout_s: float, metadata: Metadata) -> bytes:
        """As `ask`, for a request with `items` items: they count towards the load and the measured speed."""
        self.speed.start(items, time.monotonic())
        answered = False
        try:
            response = await self.ask(ENCODE_METHODS[tower], request, timeout_s, metadata)
            answered = True
        finally:
            now = time.monotonic()
            self.speed.finish(items, now, answered)
        if first_outcome(response) == "embedding":
            self.last_embedding = now
        return response

    async def close(self) -> None:
        """Ends the connections, and what is under way on them."""
        for channel in self._channels:
            await channel.close()


class PoolSet:
    """All pools, in the order of the settings."""

    def __init__(self, settings: RouterSettings) -> None:
        self.all = [Pool(target, settings) for target in settings.pools]
        self.by_name = {pool.name: pool for pool in self.all}

    def views(self) -> list[PoolView]:
        now = time.monotonic()
        return [pool.view(now) for pool in self.all]

    async def close(self) -> None:
        for pool in self.all:
            await pool.close()


def _open_channel(address: str, settings: RouterSettings) -> grpc.aio.Channel:
    return grpc.aio.insecure_channel(address, options=channel_options(settings.max_message_bytes, settings.connection))


def channel_options(max_message_bytes: int, connection: ConnectionSettings) -> list[tuple[str, int]]:
    """gRPC core's options of a connection to a pool."""
    return [
        ("grpc.max_send_message_length", max_message_bytes),
        ("grpc.max_receive_message_length", max_message_bytes),
        # Without this, channels to one address would share one connection.
        ("grpc.use_local_subchannel_pool", 1),
        # The default waits up to two minutes before it looks again for a pool that was away.
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_FIRST_MS),
        # gRPC core's name for how long one attempt to connect may take.
        ("grpc.min_reconnect_backoff_ms", _CONNECT_TIMEOUT_MS),
        ("grpc.max_reconnect_backoff_ms", int(connection.reconnect_max_s * 1e3)),
        ("grpc.keepalive_time_ms", int(connection.keepalive_s * 1e3)),
        ("grpc.keepalive_timeout_ms", int(connection.keepalive_timeout_s * 1e3)),
    ]
