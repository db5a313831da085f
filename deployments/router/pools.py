"""The pools as the router knows them: connections, what they serve, how they stand, how fast they are."""

import asyncio
import itertools
import time
from collections.abc import Iterator, Mapping, Sequence

import grpc

from deployments.router.calls import Metadata
from deployments.router.ejection import Ejection
from deployments.router.envelope import first_outcome
from deployments.router.inventory import Inventory
from deployments.router.pick import PoolView
from deployments.router.sections import ConnectionSettings, PoolTarget, PoolTls
from deployments.router.settings import RouterSettings
from deployments.router.speed import Speed
from deployments.router.tls import pool_credentials
from encoder.settings import TowerName
from encoder.v1 import encoder_pb2 as pb

SERVICE = pb.DESCRIPTOR.services_by_name["EncoderService"].full_name
ENCODE_METHODS: Mapping[TowerName, str] = {"vision": "EncodeImages", "text": "EncodeText"}
_METHODS = (*ENCODE_METHODS.values(), "ListModels", "GetBackendReport")
_RECONNECT_FIRST_MS = 100
_CONNECT_TIMEOUT_MS = 5000

Lane = dict[str, grpc.aio.UnaryUnaryMultiCallable]


class Pool:
    """One pool. Changed by the router's event loop alone."""

    def __init__(self, target: PoolTarget, settings: RouterSettings) -> None:
        """Raises InvalidInput when its TLS files cannot be used."""
        self.name = target.name
        self.address = target.address
        self.healthy = False
        self.reason = "not probed yet"
        # Why its vectors do not belong to the fleet's; empty when they do, or nobody looked.
        self.quarantine = ""
        self.ejection = Ejection(settings.ejection)
        self.declared: frozenset[str] | None = frozenset(target.towers) or None
        # What the pool says of itself; None until it was asked.
        self.inventory: Inventory | None = None
        self.reports: tuple[pb.ReplicaReport, ...] = ()
        self.speed = Speed(time.monotonic())
        # When an embedding came back last, probe or not (time.monotonic()).
        self.last_embedding = float("-inf")
        # What its keeper shall look at, and the event that wakes it.
        self.doubted = False
        self.changed = False
        self.alarm = asyncio.Event()
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        connections = range(settings.connection.per_pool)
        self._channels = [open_channel(target.address, target.tls, settings) for _ in connections]
        self._lanes: Iterator[Lane] = itertools.cycle(
            [{name: channel.unary_unary(f"/{SERVICE}/{name}") for name in _METHODS} for channel in self._channels]
        )

    @property
    def towers(self) -> frozenset[str] | None:
        """What the settings say it serves, else what it says itself; None until that is known."""
        if self.declared is not None:
            return self.declared
        return frozenset(self.models) if self.models is not None else None

    @property
    def models(self) -> Mapping[str, frozenset[str]] | None:
        """Models by tower, as the pool says; None until it was asked."""
        return self.inventory.models if self.inventory is not None else None

    @property
    def dimensions(self) -> Mapping[str, int]:
        """Size of a full vector by tower; 0, or nothing, where it is not known."""
        return self.inventory.dimensions if self.inventory is not None else {}

    @property
    def in_force(self) -> bool:
        """Whether it gets traffic, but for ejections."""
        return self.healthy and not self.quarantine

    def doubt(self) -> None:
        """A call failed in a way that speaks against the pool: it is to be probed."""
        self.doubted = True
        self.alarm.set()

    def has_changed(self) -> None:
        """Its replicas, or what they serve, are not what the router knows: it is to be asked and checked."""
        self.changed = True
        self.alarm.set()

    def view(self, now: float) -> PoolView:
        """How the pool stands, for `pick`."""
        speed = self.speed
        return PoolView(
            self.name,
            self.towers,
            self.models,
            self.healthy,
            self.quarantine,
            self.ejection.is_out(now),
            self.inventory.lacks if self.inventory is not None else {},
            speed.in_flight,
            speed.items_per_second(),
            speed.ceiling(now),
        )

    async def ask(self, method: str, request: bytes, timeout_s: float, metadata: Metadata) -> bytes:
        """One unary call, bytes in and bytes out; raises grpc.aio.AioRpcError. Cancelling this cancels the call."""
        self._calls += 1
        self._idle.clear()
        try:
            response: bytes = await next(self._lanes)[method](request, timeout=timeout_s, metadata=metadata)
            return response
        finally:
            self._calls -= 1
            if self._calls == 0:
                self._idle.set()

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
        if first_outcome(response) in ("embedding", "features"):
            self.last_embedding = now
        return response

    async def close_when_idle(self) -> None:
        """Waits for the calls under way, then ends the connections."""
        await self._idle.wait()
        await self.close()

    async def close(self) -> None:
        """Ends the connections, and what is under way on them."""
        for channel in self._channels:
            await channel.close()


class PoolSet:
    """All pools that there are now: those of the settings in their order, then those that were found, by name."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self.by_name: dict[str, Pool] = {}
        for target in settings.pools:
            self.add(target)

    @property
    def all(self) -> Sequence[Pool]:
        return tuple(self.by_name.values())

    def add(self, target: PoolTarget) -> Pool:
        """Raises InvalidInput when its TLS files cannot be used."""
        pool = Pool(target, self._settings)
        fixed = [known.name for known in self._settings.pools]
        found = sorted((*(name for name in self.by_name if name not in fixed), target.name))
        pools = self.by_name | {target.name: pool}
        self.by_name = {name: pools[name] for name in dict.fromkeys((*fixed, *found)) if name in pools}
        return pool

    def remove(self, name: str) -> Pool:
        """It gets no more calls; those under way go on."""
        pools = dict(self.by_name)
        pool = pools.pop(name)
        self.by_name = pools
        return pool

    def views(self) -> list[PoolView]:
        now = time.monotonic()
        return [pool.view(now) for pool in self.by_name.values()]

    async def close(self) -> None:
        for pool in self.all:
            await pool.close()


def open_channel(address: str, tls: PoolTls | None, settings: RouterSettings) -> grpc.aio.Channel:
    """Raises InvalidInput when the TLS files cannot be used."""
    options = channel_options(settings.max_message_bytes, settings.connection)
    if tls is None:
        return grpc.aio.insecure_channel(address, options=options)
    if tls.server_name:
        options = [*options, ("grpc.ssl_target_name_override", tls.server_name)]
    return grpc.aio.secure_channel(address, pool_credentials(tls), options=options)


def channel_options(max_message_bytes: int, connection: ConnectionSettings) -> list[tuple[str, int | str]]:
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
        # An unanswered keepalive ping ends a connection by this one, which is a minute by default.
        ("grpc.http2.ping_timeout_ms", int(connection.keepalive_timeout_s * 1e3)),
    ]
