"""Prometheus metrics of the router, in a registry of its own; served over HTTP when a port is set."""

import time
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server

from encoder.errors import InvalidInput

if TYPE_CHECKING:
    from deployments.router.pools import Pool

SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """Counters that the router's parts add to, and gauges that read the pools when they are scraped."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self._calls = Counter(
            "vitfleet_router_calls", "Calls of clients, by their outcome", ["method", "code"], registry=self.registry
        )
        self._seconds = Histogram(
            "vitfleet_router_call_seconds",
            "Duration of clients' calls",
            ["method"],
            buckets=SECONDS_BUCKETS,
            registry=self.registry,
        )
        self._pool_calls = Counter(
            "vitfleet_router_pool_calls", "Calls to pools, by their outcome", ["pool", "code"], registry=self.registry
        )
        self._retries = Counter(
            "vitfleet_router_retries", "Calls that were tried again", ["pool"], registry=self.registry
        )
        self._probes = Counter("vitfleet_router_probes", "Health probes", ["pool", "outcome"], registry=self.registry)
        self._stream_items = Counter(
            "vitfleet_router_stream_items", "Items of streams, by their outcome", ["code"], registry=self.registry
        )
        self._in_flight = Gauge(
            "vitfleet_router_pool_in_flight_items", "Items at a pool now", ["pool"], registry=self.registry
        )
        self._speed = Gauge(
            "vitfleet_router_pool_items_per_second", "Measured speed of a pool", ["pool"], registry=self.registry
        )
        self._healthy = Gauge(
            "vitfleet_router_pool_healthy", "1 when a pool passes its probes", ["pool"], registry=self.registry
        )

    def watch(self, pools: Sequence["Pool"]) -> None:
        """Reads these pools whenever metrics are scraped."""
        for pool in pools:
            self._in_flight.labels(pool.name).set_function(partial(_in_flight, pool))
            self._speed.labels(pool.name).set_function(partial(_items_per_second, pool))
            self._healthy.labels(pool.name).set_function(partial(_healthy, pool))

    def call(self, method: str, code: str, started: float) -> None:
        self._calls.labels(method, code).inc()
        self._seconds.labels(method).observe(time.monotonic() - started)

    def pool_call(self, pool: str, code: str) -> None:
        self._pool_calls.labels(pool, code).inc()

    def retry(self, pool: str) -> None:
        self._retries.labels(pool).inc()

    def probe(self, pool: str, outcome: str) -> None:
        self._probes.labels(pool, outcome).inc()

    def stream_item(self, code: str) -> None:
        self._stream_items.labels(code).inc()


def _in_flight(pool: "Pool") -> float:
    return float(pool.speed.in_flight)


def _items_per_second(pool: "Pool") -> float:
    return pool.speed.items_per_second() or 0.0


def _healthy(pool: "Pool") -> float:
    return float(pool.healthy)


class MetricsServer:
    """Serves a registry over HTTP, from a thread of its own; `port` is the port it took."""

    def __init__(self, metrics: Metrics, host: str, port: int) -> None:
        try:
            self._server, self._thread = start_http_server(port, host, metrics.registry)
        except OSError as error:
            raise InvalidInput(f"metrics cannot be served on {host}:{port}: {error.strerror}") from None
        self.port: int = self._server.server_port

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
