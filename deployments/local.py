"""A whole fleet on this machine: Ray, Serve behind HAProxy (or its stock proxy), the pools, and the router.

Ray runs in a child process (`deployments.fleet_host`), so that its environment is complete before ray is imported, and
so that several fleets, of different modes too, can run side by side: each has its own Ray, folder, ports and HAProxy.

Ray Serve itself opens some ports on all interfaces, which it offers no setting for: the replicas' ports, HAProxy's
statistics, and the stock proxy's gRPC port. HAProxy's front end and the router listen on `serve.host` alone.
"""

import json
import logging
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

import psutil

from deployments.events import FleetEvent
from deployments.processes import MARK_VARIABLE, PortBlock, end_processes, marked_processes, port_is_free
from deployments.serve_config import ServeConfig, claim_of, load_serve_config, without_text_pools
from deployments.settings import LocalSettings, OwnPorts, serve_environment
from encoder.errors import InvalidInput, NotReady

logger = logging.getLogger(__name__)
Progress = Callable[[FleetEvent], None]
# Serve drains, Ray ends its processes; then what is left is ended by pid.
STOP_TIMEOUT_S = 60.0
LEFTOVER_GRACE_S = 3.0
# The host tells by itself that a start takes too long; this is for a host that hangs.
ANSWER_GRACE_S = 30.0
# A port block: two ports for HAProxy, three for the front, two for the fallback proxy, then the replicas' ranges.
HTTP_OFFSETS, GRPC_OFFSETS = (8, 35), (36, 63)


@dataclass(frozen=True)
class FleetAddresses:
    """Where a fleet answers, as host:port; `router` is empty for a fleet without one."""

    serve_grpc: str
    serve_http: str
    router: str


def quiet(event: FleetEvent) -> None:
    """Progress that says nothing."""


class LocalFleet:
    """Start it with `start` or as a context manager; `stop` leaves no process behind."""

    def __init__(self, settings: LocalSettings, progress: Progress = quiet) -> None:
        self.settings = settings
        self._progress = progress
        self._mark = secrets.token_hex(8)
        self._ports: PortBlock | None = None
        self._folder: Path | None = None
        self._host: subprocess.Popen[bytes] | None = None
        self._reader: threading.Thread | None = None
        self._first_answer = threading.Event()
        self._outcome: FleetEvent | None = None
        self._addresses: FleetAddresses | None = None

    @property
    def addresses(self) -> FleetAddresses:
        """Raises NotReady before the fleet is up."""
        if self._addresses is None:
            raise NotReady("the fleet is not up: start it first")
        return self._addresses

    @property
    def folder(self) -> Path:
        """Where Ray, Serve and the router leave their logs while the fleet runs; raises NotReady before the start."""
        if self._folder is None:
            raise NotReady("the fleet is not up: start it first")
        return self._folder

    def start(self) -> FleetAddresses:
        """Blocks until every pool answers. Raises InvalidInput for settings that cannot hold, NotReady for a failure.

        `progress` is called from another thread, also after the start: with "failed" when the router has ended.
        After a failure nothing runs any more; the logs are kept, and the error names their folder.
        """
        if self._host is not None:
            raise NotReady("the fleet is up already: stop it first")
        self._ports = PortBlock.reserve()
        try:
            settings = self._with_ports(self._ports)
            config = load_serve_config(settings.config, settings.serve, settings.engine)
            if "model" in settings.engine:  # not the config's own choice, whose pools may be for another model
                config = without_text_pools(config)
            self._folder = Path(tempfile.mkdtemp(prefix="vf-"))
            self._launch(settings, config)
            self._first_answer.wait(settings.startup_timeout_s + ANSWER_GRACE_S)
            outcome = self._outcome
            if outcome is None or outcome.stage != "ready":
                reason = outcome.message if outcome is not None else "its host process gave no answer"
                folder, self._folder = self._folder, None
                raise NotReady(f"the local fleet did not start: {reason} (logs: {folder})")
        except BaseException:
            self.stop()
            raise
        host = settings.serve.host
        self._addresses = FleetAddresses(
            serve_grpc=f"{host}:{settings.serve.grpc_port}",
            serve_http=f"{host}:{settings.serve.http_port}",
            router=f"{host}:{outcome.port}" if outcome.port else "",
        )
        return self._addresses

    def stop(self) -> None:
        """Ends router, Serve and Ray, then every process that is left, by pid. May be called twice."""
        self._addresses = None
        if self._host is not None:
            assert self._host.stdin is not None
            self._host.stdin.close()
            try:
                self._host.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                logger.error("the fleet's host did not end within %g s: ending its processes", STOP_TIMEOUT_S)
            end_processes(self.processes(), LEFTOVER_GRACE_S)
            self._host.wait()
            self._host = None
        if self._reader is not None:
            self._reader.join()
            self._reader = None
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
        if self._ports is not None:
            self._ports.release()
            self._ports = None

    def processes(self) -> list[psutil.Process]:
        """Every process of this fleet that runs now, wherever it was re-parented to."""
        return marked_processes(self._mark)

    def __enter__(self) -> "LocalFleet":
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _with_ports(self, block: PortBlock) -> LocalSettings:
        """The settings with a free port for each 0; raises InvalidInput for a port that is taken, or another's host."""
        serve = self.settings.serve
        if not port_is_free(0, serve.host):
            raise InvalidInput(f"{serve.host} is no address of this machine: listen on 127.0.0.1, or on 0.0.0.0")
        filled = {
            "grpc_port": serve.grpc_port or block.port(2),
            "http_port": serve.http_port or block.port(3),
        }
        router_port = self.settings.router_port or block.port(4)
        for name, port in (*filled.items(), *((("router_port", router_port),) if self.settings.router else ())):
            if not port_is_free(port, serve.host):
                raise InvalidInput(f"{name}={port} is taken on {serve.host}: choose another, or 0 for a free one")
        return self.settings.model_copy(update={"serve": serve.model_copy(update=filled), "router_port": router_port})

    def _launch(self, settings: LocalSettings, config: ServeConfig) -> None:
        assert self._ports is not None and self._folder is not None
        events_read, events_write = os.pipe()
        order = {
            "folder": str(self._folder),
            "document": config.document,
            **asdict(claim_of(config.pools)),
            "object_store_bytes": settings.object_store_bytes,
            "startup_timeout_s": settings.startup_timeout_s,
            "events": events_write,
            "started": time.monotonic(),
            "router": _router_settings(settings, config) if settings.router else None,
        }
        self._host = subprocess.Popen(
            [sys.executable, "-m", "deployments.fleet_host"],
            stdin=subprocess.PIPE,
            stdout=(self._folder / "host.log").open("w"),
            stderr=subprocess.STDOUT,
            env=self._environment(settings),
            pass_fds=(events_write, self._ports.lock),
            # A session of its own: Ctrl-C in a terminal reaches the parent alone, which stops the fleet in order.
            start_new_session=True,
        )
        os.close(events_write)
        assert self._host.stdin is not None
        self._host.stdin.write(json.dumps(order).encode() + b"\n")
        self._host.stdin.flush()
        self._reader = threading.Thread(target=self._read_events, args=(os.fdopen(events_read),), daemon=True)
        self._reader.start()

    def _environment(self, settings: LocalSettings) -> dict[str, str]:
        assert self._ports is not None and self._folder is not None
        port = self._ports.port
        ports = OwnPorts(
            haproxy_metrics=port(0),
            haproxy_stats=port(1),
            fallback_http=port(5),
            fallback_grpc=port(6),
            http=(port(HTTP_OFFSETS[0]), port(HTTP_OFFSETS[1])),
            grpc=(port(GRPC_OFFSETS[0]), port(GRPC_OFFSETS[1])),
        )
        packages = str(Path(__file__).parent.parent)
        inherited = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
        return (
            inherited
            | serve_environment(settings.serve, ports, self._folder)
            | {
                MARK_VARIABLE: self._mark,
                "PYTHONPATH": os.pathsep.join(filter(None, (packages, inherited.get("PYTHONPATH")))),
                "RAY_USAGE_STATS_ENABLED": "0",
                # A token of this fleet alone; otherwise Ray writes one into the home folder.
                "RAY_AUTH_MODE": "token",
                "RAY_AUTH_TOKEN": secrets.token_hex(32),
            }
        )

    def _read_events(self, lines: IO[str]) -> None:
        with lines:
            for line in lines:
                event = FleetEvent.from_line(line)
                try:
                    self._progress(event)
                except Exception:
                    logger.exception("the progress callback failed at stage %s", event.stage)
                if event.stage in ("ready", "failed") and self._outcome is None:
                    self._outcome = event
                    self._first_answer.set()
        self._first_answer.set()


def _router_settings(settings: LocalSettings, config: ServeConfig) -> dict[str, object]:
    address = f"{settings.serve.host}:{settings.serve.grpc_port}"
    return {
        "host": settings.serve.host,
        "port": settings.router_port,
        "pools": [{"name": pool.name, "address": address, "towers": [pool.engine.tower]} for pool in config.pools],
        "max_message_bytes": settings.serve.max_message_bytes,
        "drain": {"notice_s": 0.0, "grace_s": 3.0},
    }
