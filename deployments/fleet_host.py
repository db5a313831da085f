"""The process that holds one local fleet: Ray's driver, and the parent of everything the fleet starts.

`deployments.local.LocalFleet` starts it with the Serve environment already set, since Ray's processes read that when
they import ray. Its first line on standard input is the order (JSON); the end of standard input, which also comes when
the parent dies, or SIGTERM ends the fleet. Events go to the descriptor named in the order.
"""

import json
import logging
import os
import selectors
import shutil
import signal
import subprocess
import sys
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO, NoReturn

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from deployments.events import FAILED_STAGE, FleetEvent, Stage
from deployments.processes import become_subreaper, end_processes
from deployments.wire import one_line
from encoder.errors import EncoderError, NotReady
from encoder.v1 import encoder_pb2 as pb
from encoder.v1 import encoder_pb2_grpc

POLL_S = 0.2
RAY_ATTEMPTS = 3
ROUTER_GRACE_S = 5.0
LEFTOVER_GRACE_S = 5.0


@dataclass(frozen=True)
class Order:
    """What the host is to run; `router` is the router's settings, or None for no router; `started` is monotonic."""

    folder: str
    document: dict[str, Any]
    cpus: int
    gpus: int
    resources: dict[str, float]
    object_store_bytes: int
    startup_timeout_s: float
    events: int
    router: dict[str, Any] | None
    started: float
    attempt: int = 1


class Stopped(Exception):
    """The parent wants the end, or is gone."""


class Host:
    """Starts the fleet, waits for the end, stops it."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._events: BinaryIO = os.fdopen(order.events, "wb", buffering=0)
        self._router: subprocess.Popen[str] | None = None
        self._up = False
        self._input = selectors.DefaultSelector()
        self._input.register(sys.stdin.fileno(), selectors.EVENT_READ)

    def run(self) -> int:
        """The exit status: 0 for a fleet that was told to end, 1 for one that did not come up or lost its router."""
        try:
            self._start_ray()
            self._start_serve()
            self._wait_for_pools()
            port = self._start_router()
            self._up = True
            self._tell("ready", "the fleet answers", port=port)
            while True:
                self._pause(1.0)
                self._check_router()
        except Stopped:
            return 0
        except EncoderError as error:
            self._tell("failed", str(error))
        except Exception as error:
            self._tell("failed", f"{type(error).__name__}: {one_line(str(error))}")
        return 1

    def stop(self) -> None:
        """Ends the router, Serve and Ray in this order, then whatever is left of this process's descendants."""
        if self._router is not None and self._router.poll() is None:
            end_processes([psutil.Process(self._router.pid)], ROUTER_GRACE_S)
        ray = sys.modules.get("ray")
        # Serve would start a Ray of its own to look for something to shut down.
        if ray is not None and ray.is_initialized():
            from ray import serve

            for shut_down in (serve.shutdown, ray.shutdown):
                with suppress(Exception):
                    shut_down()
        end_processes(psutil.Process().children(recursive=True), LEFTOVER_GRACE_S)

    def _start_ray(self) -> None:
        self._tell("ray", "starting")
        import ray

        try:
            ray.init(
                address="local",
                num_cpus=self._order.cpus,
                num_gpus=self._order.gpus,
                resources=self._order.resources,
                object_store_memory=self._order.object_store_bytes,
                include_dashboard=False,
                # The outward address may change under a running fleet, as a laptop's does; loopback stays.
                _node_ip_address="127.0.0.1",
                log_to_driver=False,
                logging_level=logging.ERROR,
                _temp_dir=self._order.folder,
            )
        except Exception as error:
            if self._order.attempt == RAY_ATTEMPTS:
                raise
            self._tell("ray", f"failed to start, trying again: {one_line(str(error))}")
            self._begin_again()
        self._tell("ray", "up")

    def _begin_again(self) -> NoReturn:
        """The same order in a fresh image of this process: Ray keeps traces of a failed start in the old one.

        Ray gives its processes 30 s to come up, which a machine under load may need more than once.
        """
        end_processes(psutil.Process().children(recursive=True), LEFTOVER_GRACE_S)
        self._pause(0)
        again = replace(self._order, attempt=self._order.attempt + 1)
        os.execv(sys.executable, [sys.executable, "-m", "deployments.fleet_host", json.dumps(asdict(again))])

    def _start_serve(self) -> None:
        self._tell("serve", "starting")
        from ray import serve
        from ray.serve.context import _get_global_client
        from ray.serve.schema import ServeDeploySchema

        config = ServeDeploySchema.model_validate(self._order.document)
        serve.start(
            proxy_location=config.proxy_location,
            http_options=config.http_options.model_dump(),
            grpc_options=config.grpc_options.model_dump(),
        )
        client = _get_global_client()
        if client is None:
            raise NotReady("Ray Serve did not come up: see its log")
        client.deploy_apps(config)
        self._tell("serve", "up")

    def _wait_for_pools(self) -> None:
        """Until every pool answers through the front end; raises NotReady with the reason when one cannot."""
        from ray import serve

        waiting = {application["name"] for application in self._order.document["applications"]}
        told: dict[str, str] = {}
        for pool in sorted(waiting):
            self._tell("pool", "starting a process", pool=pool)
        while waiting:
            self._pause(POLL_S)
            stages = _startup_stages()
            statuses = serve.status().applications
            for pool in sorted(waiting):
                failed = next(
                    (stage for stage in stages.get(pool, {}).values() if stage.startswith(FAILED_STAGE)), None
                )
                if failed is not None:
                    raise NotReady(f"pool {pool} did not start: {failed.removeprefix(FAILED_STAGE)}")
                status = statuses.get(pool)
                if status is None:
                    continue
                if status.status == "DEPLOY_FAILED":
                    raise NotReady(f"pool {pool} did not start: {_reason(status.message)}")
                if status.status == "RUNNING" and self._answers(pool):
                    waiting.discard(pool)
                    self._tell("pool", "ready", pool=pool)
                    continue
                for replica, stage in stages.get(pool, {}).items():
                    if told.get(replica) != stage:
                        told[replica] = stage
                        self._tell("pool", stage, pool=pool, replica=replica)

    def _answers(self, pool: str) -> bool:
        host, port = self._order.document["http_options"]["host"], self._order.document["grpc_options"]["port"]
        with grpc.insecure_channel(f"{host}:{port}") as channel:
            try:
                encoder_pb2_grpc.EncoderServiceStub(channel).ListModels(
                    pb.ListModelsRequest(), timeout=2.0, metadata=(("application", pool),)
                )
            except grpc.RpcError:
                return False
        return True

    def _start_router(self) -> int:
        if self._order.router is None:
            return 0
        self._tell("router", "starting")
        self._router = subprocess.Popen(
            [sys.executable, "-m", "deployments.router", "--settings", json.dumps(self._order.router)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=self._router_log.open("w"),
            text=True,
        )
        assert self._router.stdout is not None
        line = self._router.stdout.readline()
        if not line.startswith("listening on "):
            raise NotReady(f"the router did not start: {self._router_words()}")
        port = int(line.rsplit(":", 1)[1])
        while not _healthy(f"{self._order.router['host']}:{port}"):
            self._pause(POLL_S)
            self._check_router()
        self._tell("router", "up", port=port)
        return port

    def _check_router(self) -> None:
        if self._router is not None and self._router.poll() is not None:
            raise NotReady(f"the router ended with status {self._router.returncode}: {self._router_words()}")

    def _router_words(self) -> str:
        lines = self._router_log.read_text(errors="replace").strip().splitlines()
        return lines[-1] if lines else "it said nothing"

    @property
    def _router_log(self) -> Path:
        return Path(self._order.folder) / "router.log"

    def _pause(self, seconds: float) -> None:
        """Waits; raises Stopped at the end of standard input, NotReady when the start takes too long."""
        if self._input.select(timeout=seconds) and not os.read(sys.stdin.fileno(), 1024):
            raise Stopped
        if not self._up and time.monotonic() - self._order.started > self._order.startup_timeout_s:
            raise NotReady(f"the fleet is not up after {self._order.startup_timeout_s:g} s")

    def _tell(self, stage: Stage, message: str, *, pool: str = "", replica: str = "", port: int = 0) -> None:
        event = FleetEvent(stage, message, round(time.monotonic() - self._order.started, 2), pool, replica, port)
        with suppress(BrokenPipeError):
            self._events.write(event.to_line().encode())


def _startup_stages() -> dict[str, dict[str, str]]:
    """What the replicas of each pool say of their start: pool → replica → stage."""
    from ray.experimental import internal_kv

    from deployments.pool import STARTUP_NAMESPACE

    stages: dict[str, dict[str, str]] = {}
    for key in internal_kv._internal_kv_list("", namespace=STARTUP_NAMESPACE):
        value = internal_kv._internal_kv_get(key, namespace=STARTUP_NAMESPACE)
        if value is not None:
            pool, replica = key.decode().split("/")
            stages.setdefault(pool, {})[replica] = value.decode()
    return stages


def _reason(message: str) -> str:
    """The last line of what Serve says, which carries the exception."""
    lines = [line.strip() for line in message.splitlines() if line.strip()]
    return lines[-1] if lines else "Serve gave no reason"


def _healthy(address: str) -> bool:
    with grpc.insecure_channel(address) as channel:
        try:
            answer = health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=2.0)
        except grpc.RpcError:
            return False
    return bool(answer.status == health_pb2.HealthCheckResponse.SERVING)


def _stop_on_signal(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_IGN)
    raise Stopped


def main() -> int:
    """Runs one fleet; the order comes first on standard input, or as an argument of this process's own."""
    become_subreaper()
    order = Order(**json.loads(sys.argv[1] if len(sys.argv) > 1 else sys.stdin.buffer.readline()))
    host = Host(order)
    signal.signal(signal.SIGTERM, _stop_on_signal)
    status = 1
    try:
        status = host.run()
    finally:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        host.stop()
        if status == 0:  # the parent, which removes it too, may be gone; after a failure the logs are wanted
            shutil.rmtree(order.folder, ignore_errors=True)
    return status


if __name__ == "__main__":
    sys.exit(main())
