"""A real fleet for a benchmark: HAProxy mode, a router, ViT-B/32 of real size; and who of its processes does what."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
import yaml

from benchmarks.results import say
from deployments.events import FleetEvent
from deployments.local import LocalFleet
from deployments.settings import LocalSettings, ServeSettings
from encoder.v1 import encoder_pb2 as pb
from encoder.v1 import encoder_pb2_grpc

VISION, TEXT = "vision-cpu", "text"
STARTUP_TIMEOUT_S = 300.0


@dataclass(frozen=True)
class Pool:
    """One pool of a benchmark; `engine` overrides engine settings; without a `model` it is ViT-B/32 of real size."""

    name: str = VISION
    cpus: float = 2.0
    replicas: int = 1
    engine: Mapping[str, Any] = field(default_factory=dict)
    model: str | None = None

    def application(self) -> dict[str, Any]:
        """As a Serve config has it."""
        from benchmarks.subjects import checkpoint

        engine = {
            "model": self.model or str(checkpoint()),
            "tower": "text" if self.name == TEXT else "vision",
            "device": "cpu",
            "dtype": "bfloat16",
            "runner": "openvino",
            **self.engine,
        }
        args = {"name": self.name, "num_replicas": self.replicas, "num_cpus": self.cpus, "engine": engine}
        return {
            "name": self.name,
            "route_prefix": f"/{self.name}",
            "import_path": "deployments.app:build_pool",
            "args": args,
        }


@dataclass(frozen=True)
class Memory:
    """Resident bytes of a pool's replicas, and of the decode workers under them."""

    replicas: int
    workers: int

    @property
    def megabytes(self) -> float:
        return (self.replicas + self.workers) / 1e6


class Running:
    """A fleet that answers."""

    def __init__(self, fleet: LocalFleet, pools: Sequence[Pool], events: Sequence[FleetEvent]) -> None:
        self._fleet = fleet
        self.events = events
        self.router = fleet.addresses.router
        self.serve = fleet.addresses.serve_grpc
        self.reports = {pool.name: self._report(pool.name) for pool in pools}

    def served(self, pool: str = VISION) -> int:
        """Items that the pool's replicas have computed since they started."""
        return sum(report.counters["items"] for report in self._report(pool))

    def _report(self, pool: str) -> list[pb.ReplicaReport]:
        with grpc.insecure_channel(self.serve) as channel:
            stub = encoder_pb2_grpc.EncoderServiceStub(channel)
            request, metadata = pb.GetBackendReportRequest(pool=pool), (("application", pool),)
            answer = stub.GetBackendReport(request, timeout=20, metadata=metadata, wait_for_ready=True)
        return list(answer.replicas)

    def roles(self) -> dict[str, list[int]]:
        """Pids by what they do: replica (with its decode workers), router, haproxy, and the rest of Ray and Serve."""
        roles: dict[str, list[int]] = {"replica": [], "router": [], "haproxy": [], "ray": []}
        replicas = {report.pid for reports in self.reports.values() for report in reports}
        workers = {child.pid for pid in replicas for child in _children(pid)}
        for process in self._fleet.processes():
            try:
                command = process.cmdline()
            except psutil.Error:
                continue
            if process.pid in replicas | workers:
                roles["replica"].append(process.pid)
            elif "deployments.router" in command:
                roles["router"].append(process.pid)
            elif command and "haproxy" in Path(command[0]).name:
                roles["haproxy"].append(process.pid)
            else:
                roles["ray"].append(process.pid)
        return roles

    def memory(self, pool: str = VISION) -> Memory:
        """Now."""
        pids = [report.pid for report in self.reports[pool]]
        workers = [child for pid in pids for child in _children(pid)]
        return Memory(
            sum(_rss(psutil.Process(pid)) for pid in pids),
            sum(_rss(child) for child in workers),
        )


@contextmanager
def fleet(pools: Sequence[Pool]) -> Iterator[Running]:
    """Starts a fleet of these pools and stops it, whatever happens inside."""
    say(f"starting a fleet: {', '.join(pool.name for pool in pools)}")
    events: list[FleetEvent] = []
    with tempfile.TemporaryDirectory() as folder:
        config = Path(folder) / "config.yaml"
        config.write_text(yaml.safe_dump({"applications": [pool.application() for pool in pools]}))
        serve = ServeSettings(grpc_port=0, http_port=0, drain_period_s=0.5)
        settings = LocalSettings(config=config, serve=serve, router_port=0, startup_timeout_s=STARTUP_TIMEOUT_S)
        with LocalFleet(settings, events.append) as started:
            say(f"  answers after {events[-1].seconds:.1f} s")
            yield Running(started, pools, events)


def _children(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.Error:
        return []


def _rss(process: psutil.Process) -> int:
    try:
        return int(process.memory_info().rss)
    except psutil.Error:
        return 0
