"""Puts the router together and runs it."""

import asyncio
import logging
import signal
from collections.abc import Sequence

import grpc
from grpc_health.v1 import health, health_pb2_grpc
from grpc_reflection.v1alpha import reflection

from deployments.router.discovery import Discovery
from deployments.router.gate import Gate
from deployments.router.health import HealthBoard
from deployments.router.logs import log_event
from deployments.router.metrics import Metrics, MetricsServer, PoolGauges
from deployments.router.pools import SERVICE, PoolSet
from deployments.router.quarantine import Quarantine
from deployments.router.roster import Roster
from deployments.router.service import RouterService
from deployments.router.settings import RouterSettings
from deployments.router.tls import ServerCertificates
from deployments.router.tokens.guard import Guard, TokenInterceptor
from deployments.router.tokens.keyring import Keyring
from encoder.errors import InvalidInput

logger = logging.getLogger(__name__)
# After the last answer was handed to gRPC: time for it to reach the client. Watchers of health are cut off then.
_FLUSH_S = 0.25
_LOOPBACK = ("127.0.0.1", "::1", "localhost")


class Router:
    """The gateway: `start`, then `drain` or `stop`. Belongs to one event loop."""

    def __init__(self, settings: RouterSettings) -> None:
        """Raises InvalidInput when a file that the settings name cannot be used."""
        self.settings = settings
        self.port = 0
        self.metrics_port: int | None = None
        self.metrics = Metrics()
        self.metrics.watch(PoolGauges(lambda: self.pools.all))
        self.pools = PoolSet(settings)
        self.quarantine = Quarantine(self.pools, settings.agreement, self.metrics)
        self._gate = Gate()
        self._board = HealthBoard(self.pools)
        self._roster = Roster(self.pools, self.quarantine, self._board, settings, self.metrics)
        self._keyring = Keyring(settings.tokens, self.metrics) if settings.tokens is not None else None
        self._certificates = ServerCertificates(settings.tls, self.metrics) if settings.tls is not None else None
        self._discovery: Discovery | None = None
        if settings.discovery is not None:
            self._discovery = Discovery(settings.discovery, settings, self.pools, self._roster)
        self._tasks: list[asyncio.Task[None]] = []
        self._metrics_server: MetricsServer | None = None
        self._server = self._build()

    async def start(self) -> None:
        """Opens the port and begins to probe the pools.

        Raises InvalidInput when a port cannot be had, or the TLS files cannot be used.

        Calls are UNAVAILABLE until a pool has passed its first probe.
        """
        settings = self.settings
        address = _address(settings.host, settings.port)
        credentials = self._certificates.credentials() if self._certificates is not None else None
        try:
            if credentials is None:
                self.port = self._server.add_insecure_port(address)
            else:
                self.port = self._server.add_secure_port(address, credentials)
        except RuntimeError:
            raise InvalidInput(
                f"port {settings.port} of {settings.host} cannot be opened: another process may have it, choose another"
            ) from None
        if settings.metrics_port is not None:
            self._metrics_server = MetricsServer(self.metrics, settings.metrics_host, settings.metrics_port)
            self.metrics_port = self._metrics_server.port
        await self._board.publish()
        await self._server.start()
        self._roster.start()
        if self._discovery is not None:
            self._tasks.append(asyncio.create_task(self._discovery.run()))
        if self._keyring is not None:
            self._tasks.append(asyncio.create_task(self._keyring.follow()))
            self._warn_of_plain_tokens()
        log_event(logger, logging.INFO, "listening", {"host": settings.host, "port": self.port})

    async def drain(self) -> None:
        """Ends in order: NOT_SERVING, after a notice refuse new calls, let those under way end, then stop."""
        settings = self.settings.drain
        log_event(logger, logging.INFO, "draining", {"grace_s": settings.grace_s})
        await self._board.drain()
        await asyncio.sleep(settings.notice_s)
        self._gate.close()
        left = await self._gate.wait_empty(settings.grace_s)
        if left:
            log_event(logger, logging.WARNING, "calls_cut_off", {"calls": left, "grace_s": settings.grace_s})
        await self.stop()

    async def stop(self) -> None:
        """Ends now; calls under way are cut off."""
        self._gate.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.stop(_FLUSH_S)
        await self._roster.stop()
        if self._discovery is not None:
            await self._discovery.close()
        if self._metrics_server is not None:
            self._metrics_server.close()
            self._metrics_server = None

    def _build(self) -> grpc.aio.Server:
        settings = self.settings
        guard = Guard(self._keyring)
        service = RouterService(self.pools, self.quarantine, guard, self._gate, settings, self.metrics)
        interceptors = []
        if settings.tokens is not None:
            interceptors.append(TokenInterceptor(guard, settings.tokens.reflection_exempt, service.refused))
        server = grpc.aio.server(options=server_options(settings), interceptors=interceptors)
        server.add_generic_rpc_handlers((service.handler(),))
        health_pb2_grpc.add_HealthServicer_to_server(self._board.servicer, server)
        if settings.reflection:
            reflection.enable_server_reflection((SERVICE, health.SERVICE_NAME, reflection.SERVICE_NAME), server)
        return server

    def _warn_of_plain_tokens(self) -> None:
        if self._certificates is None and self.settings.host not in _LOOPBACK:
            fields = {"host": self.settings.host, "next": "set tls, or let something before the router end it"}
            log_event(logger, logging.WARNING, "tokens_in_plain_text", fields)


async def run(settings: RouterSettings) -> None:
    """Runs a router until SIGTERM or SIGINT, then drains it; a second signal ends it at once.

    Prints one line, `listening on HOST:PORT`, when the port is open. Raises InvalidInput when it cannot be had.
    """
    router = Router(settings)
    signals: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, signals.put_nowait, number)
    try:
        await router.start()
        print(f"listening on {_address(settings.host, router.port)}", flush=True)
        await signals.get()
        draining = asyncio.create_task(router.drain())
        again = asyncio.create_task(signals.get())
        await asyncio.wait({draining, again}, return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
        if not draining.done():
            draining.cancel()
            await asyncio.gather(draining, return_exceptions=True)
        else:
            draining.result()
    finally:
        await router.stop()


def server_options(settings: RouterSettings) -> Sequence[tuple[str, int]]:
    """gRPC core's options of the client-facing side.

    A request over max_message_bytes is refused by gRPC itself, before it is held in memory as a whole:
    RESOURCE_EXHAUSTED, "Received message larger than max (SIZE vs. MAX)".
    """
    connection = settings.connection
    return (
        ("grpc.max_receive_message_length", settings.max_message_bytes),
        ("grpc.max_send_message_length", settings.max_message_bytes),
        # Else a second router could open the same port, and take half of the calls.
        ("grpc.so_reuseport", 0),
        ("grpc.keepalive_time_ms", int(connection.keepalive_s * 1e3)),
        ("grpc.keepalive_timeout_ms", int(connection.keepalive_timeout_s * 1e3)),
        # An unanswered keepalive ping ends a connection by this one, which is a minute by default.
        ("grpc.http2.ping_timeout_ms", int(connection.keepalive_timeout_s * 1e3)),
        ("grpc.keepalive_permit_without_calls", 1),
        ("grpc.http2.min_ping_interval_without_data_ms", int(connection.min_client_ping_s * 1e3)),
        ("grpc.http2.min_recv_ping_interval_without_data_ms", int(connection.min_client_ping_s * 1e3)),
        ("grpc.max_connection_age_ms", int(connection.max_age_s * 1e3)),
        ("grpc.max_connection_age_grace_ms", int(connection.max_age_grace_s * 1e3)),
    )


def _address(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
