"""Prometheus metrics of the router, in a registry of its own; served over HTTP when a port is set.

A call's `pool` is the one that answered it last, and empty where none was asked. `token` is its owner's name.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.metrics_core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from encoder.errors import InvalidInput
from encoder.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    from deployments.router.calls import Call
    from deployments.router.pools import Pool

PREFIX = "vitfleet_router_"
# How the reason begins for which a replica gave up a backend that did not prove itself: encoder.engine.
DEMOTED_REASON = "self-check failed"
SECONDS_BUCKETS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30)


class Metrics:
    """Counters that the router's parts add to."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        of_call = ["method", "pool"]
        self._calls = self._counter("calls", "Calls of clients, by their outcome", [*of_call, "code"])
        self._seconds = self._histogram("call_seconds", "Duration of clients' calls", of_call)
        self._items = self._counter("items", "Images and texts of clients' calls", of_call)
        self._bytes_in = self._counter("request_bytes", "Bytes of clients' requests", of_call)
        self._bytes_out = self._counter("response_bytes", "Bytes of the answers to clients", of_call)
        self._in_flight = Gauge(
            PREFIX + "calls_in_flight", "Clients' calls that are under way", ["method"], registry=self.registry
        )
        self._stream_items = self._counter("stream_items", "Items of streams, by their outcome", ["code"])
        self._pool_calls = self._counter("pool_calls", "Calls to pools, by their outcome", ["pool", "code"])
        self._pool_seconds = self._histogram("pool_call_seconds", "Duration of calls to pools", ["pool"])
        self._retries = self._counter("retries", "Calls that were tried again", ["pool"])
        self._hedges = self._counter("hedges", "Second calls for slow ones, to this pool", ["pool", "outcome"])
        self._poisoned = self._counter("poisoned", "Requests given up because replicas died of them", ["when"])
        self._probes = self._counter("probes", "Health probes and golden inputs", ["pool", "outcome"])
        self._ejections = self._counter("ejections", "Times a pool was left out for failed calls", ["pool"])
        self._quarantines = self._counter("quarantines", "Times a pool's vectors were found foreign", ["pool"])
        self._fallbacks = self._counter("fallbacks", "Answers that the attention fallback computed", ["pool"])
        self._token_calls = self._counter("token_calls", "Calls by owners of tokens", ["token", "code"])
        self._refusals = self._counter("token_refusals", "Calls refused for their token", ["token", "reason"])
        self._reloads = self._counter("reloads", "Changed files that were read again", ["file", "outcome"])

    def watch(self, collector: Collector) -> None:
        """Asks `collector` too whenever metrics are scraped."""
        self.registry.register(collector)

    @contextmanager
    def under_way(self, method: str) -> Iterator[None]:
        """Around a client's call."""
        gauge = self._in_flight.labels(method)
        gauge.inc()
        try:
            yield
        finally:
            gauge.dec()

    def call(self, call: "Call", code: str) -> None:
        """A client's call has ended."""
        labels = (call.method, call.pool)
        self._calls.labels(*labels, code).inc()
        self._seconds.labels(*labels).observe(time.monotonic() - call.started)
        self._items.labels(*labels).inc(call.items)
        self._bytes_in.labels(*labels).inc(call.bytes_in)
        self._bytes_out.labels(*labels).inc(call.bytes_out)
        if call.quota.name:
            self._token_calls.labels(call.quota.name, code).inc()

    def stream_item(self, code: str) -> None:
        self._stream_items.labels(code).inc()

    def pool_call(self, pool: str, code: str, seconds: float) -> None:
        self._pool_calls.labels(pool, code).inc()
        self._pool_seconds.labels(pool).observe(seconds)

    def retry(self, pool: str) -> None:
        self._retries.labels(pool).inc()

    def hedge(self, pool: str, outcome: str) -> None:
        """`outcome`: won, lost or failed."""
        self._hedges.labels(pool, outcome).inc()

    def poisoned(self, when: str) -> None:
        """`when`: found, or again for one that was sent once more."""
        self._poisoned.labels(when).inc()

    def probe(self, pool: str, outcome: str) -> None:
        self._probes.labels(pool, outcome).inc()

    def ejection(self, pool: str) -> None:
        self._ejections.labels(pool).inc()

    def quarantine(self, pool: str) -> None:
        self._quarantines.labels(pool).inc()

    def fallback(self, pool: str) -> None:
        self._fallbacks.labels(pool).inc()

    def refusal(self, token: str, reason: str) -> None:
        self._refusals.labels(token, reason).inc()

    def reload(self, file: str, outcome: str) -> None:
        self._reloads.labels(file, outcome).inc()

    def _counter(self, name: str, told: str, labels: Sequence[str]) -> Counter:
        return Counter(PREFIX + name, told, labels, registry=self.registry)

    def _histogram(self, name: str, told: str, labels: Sequence[str]) -> Histogram:
        return Histogram(PREFIX + name, told, labels, buckets=SECONDS_BUCKETS, registry=self.registry)


class PoolGauges(Collector):
    """How the pools stand when metrics are scraped; of a pool that has left nothing is told any more."""

    def __init__(self, pools: Callable[[], Sequence["Pool"]]) -> None:
        self._pools = pools

    def collect(self) -> Iterator[Metric]:
        # The scrape runs in a thread of its own.
        pools = list(self._pools())
        yield _gauge("pool_in_flight_items", "Items at a pool now", pools, lambda pool: pool.speed.in_flight)
        yield _gauge(
            "pool_items_per_second", "Measured speed of a pool", pools, lambda pool: pool.speed.items_per_second() or 0
        )
        yield _gauge("pool_healthy", "1 when a pool passes its probes", pools, lambda pool: pool.healthy)
        yield _gauge(
            "pool_quarantined", "1 when a pool's vectors are foreign", pools, lambda pool: bool(pool.quarantine)
        )
        yield _gauge(
            "pool_ejected", "1 while a pool is left out", pools, lambda pool: pool.ejection.is_out(time.monotonic())
        )
        yield _gauge("pool_replicas", "Replicas that a pool reported", pools, lambda pool: len(pool.reports))
        yield _gauge(
            "pool_demoted_replicas",
            "Replicas of a pool that gave up a backend, since it failed its self-check",
            pools,
            lambda pool: sum(_demoted(report) for report in pool.reports),
        )
        yield _gauge(
            "pool_failed_self_checks",
            "Self-checks that a pool's replicas failed, those of backends that were given up for it included",
            pools,
            lambda pool: sum(not check.passed for report in pool.reports for check in report.self_checks),
        )


def _demoted(report: pb.ReplicaReport) -> bool:
    return any(rejected.reason.startswith(DEMOTED_REASON) for rejected in report.backend.rejected)


def _gauge(name: str, told: str, pools: Sequence["Pool"], read: Callable[["Pool"], float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(PREFIX + name, told, labels=["pool"])
    for pool in pools:
        family.add_metric([pool.name], float(read(pool)))
    return family


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
