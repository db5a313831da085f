"""A fake fleet on this machine: pools of the demo model on the CPU, small enough to run several replicas on two cores.

Pools that stand for NPU pools claim a made-up resource and compute on the CPU under that name.
"""

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import psutil
import yaml

from deployments.local import LocalFleet
from deployments.serve_config import POOL_BUILDER
from deployments.settings import LocalSettings, ProxyKind, ServeSettings
from encoder.v1 import encoder_pb2 as pb
from encoder.v1 import encoder_pb2_grpc

ENGINE = {"model": "demo", "device": "cpu", "dtype": "float32", "runner": "eager", "buckets": [1, 8], "threads": 1}
# Pools claim little, so that a fleet of several fits on any machine.
COMMON: dict[str, Any] = {"num_cpus": 0.1, "health_period_s": 1.0, "health_forward_timeout_s": 5.0}
# A machine under load takes minutes to start a fleet or a replica.
START_S = 400.0
# Connects to a fleet's Ray with the fleet's own environment, and deploys the config that standard input holds.
REDEPLOY = """
import json, sys
import ray
from ray import serve
from ray.serve.context import _get_global_client
from ray.serve.schema import ServeDeploySchema
order = json.load(sys.stdin)
ray.init(address=order["address"], namespace="serve", log_to_driver=False, _node_ip_address="127.0.0.1")
serve.status()
_get_global_client().deploy_apps(ServeDeploySchema.model_validate(order["document"]))
"""


def pool(name: str, tower: str = "vision", **settings: Any) -> dict[str, Any]:
    """The `args` of a pool."""
    return {**COMMON, "name": name, "engine": {**ENGINE, "tower": tower}, **settings}


def document(pools: Sequence[dict[str, Any]], builders: Mapping[str, str] | None = None) -> dict[str, Any]:
    """A Serve config of these pools; `builders` names those that are not built by the project's own."""
    applications = [
        {
            "name": args["name"],
            "route_prefix": f"/{args['name']}",
            "import_path": (builders or {}).get(args["name"], POOL_BUILDER),
            "args": args,
        }
        for args in pools
    ]
    return {"applications": applications}


class Machine:
    """A running fleet, and what a test does to it."""

    def __init__(self, fleet: LocalFleet) -> None:
        self.fleet = fleet

    @property
    def router(self) -> str:
        return self.fleet.addresses.router

    def replicas(self, pool: str) -> dict[str, int]:
        """Process id by replica, as the pool reports; empty while nobody answers."""
        with grpc.insecure_channel(self.fleet.addresses.serve_grpc) as channel:
            stub = encoder_pb2_grpc.EncoderServiceStub(channel)
            metadata = (("application", pool), ("x-encoder-timeout-ms", "4000"))
            try:
                report = stub.GetBackendReport(pb.GetBackendReportRequest(), timeout=8, metadata=metadata)
            except grpc.RpcError:
                return {}
        return {replica.replica: replica.pid for replica in report.replicas if psutil.pid_exists(replica.pid)}

    def replaced(self, pool: str, before: Collection[str], size: int, lost: int) -> bool:
        """Whether the pool has `size` replicas now, and at least `lost` of those of `before` are gone."""
        now = self.replicas(pool)
        return len(now) == size and len(set(before) - set(now)) >= lost

    def found_unhealthy(self, replica: str) -> bool:
        """Whether Serve's controller tells in its log that it gave up the replica because its health checks failed."""
        told = f"Replica(id='{replica}'", "failed the health check"
        return any(all(words in line for words in told) for line in self.controller_log().splitlines())

    def controller_log(self) -> str:
        """What Serve's controller has told so far."""
        paths = self.fleet.folder.glob("session_2*/logs/serve/controller_[0-9]*.log")
        return "".join(path.read_text(errors="replace") for path in paths)

    def until(self, condition: Callable[[], bool], what: str, seconds: float = START_S) -> None:
        """Waits until `condition` holds; fails with `what` when it does not."""
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end, f"{what} within {seconds:g} s"
            time.sleep(0.5)

    def kill(self, pid: int, with_signal: int = signal.SIGKILL) -> None:
        """Only a process of this fleet."""
        assert self.has(pid)
        os.kill(pid, with_signal)

    def has(self, pid: int) -> bool:
        """Whether that is a running process of this fleet."""
        return pid in {process.pid for process in self.fleet.processes()}

    def named(self, name: str, starts: bool = False) -> list[int]:
        """Process ids of this fleet's processes of that name, or whose title starts with it."""
        found = []
        for process in self.fleet.processes():
            try:
                if process.name() == name or (starts and "".join(process.cmdline()).startswith(name)):
                    found.append(process.pid)
            except psutil.NoSuchProcess:
                continue
        return found

    def redeploy(self, pools: Sequence[dict[str, Any]], builders: Mapping[str, str] | None = None) -> None:
        """Hands Serve a changed config, as `serve deploy` does; Serve then replaces replicas one by one."""
        processes = self.fleet.processes()
        (host,) = [process for process in processes if "deployments.fleet_host" in process.cmdline()]
        (raylet,) = [process for process in processes if process.name() == "raylet"]
        (address,) = [
            part.partition("=")[2] for part in raylet.cmdline() if part.startswith(("--gcs-address=", "--gcs_address="))
        ]
        serve_grpc, serve_http = self.fleet.addresses.serve_grpc, self.fleet.addresses.serve_http
        changed = document(pools, builders) | {
            "proxy_location": "EveryNode",
            "http_options": {"host": "127.0.0.1", "port": int(serve_http.rpartition(":")[2])},
            "grpc_options": {
                "port": int(serve_grpc.rpartition(":")[2]),
                "grpc_servicer_functions": ["encoder.v1.encoder_pb2_grpc.add_EncoderServiceServicer_to_server"],
            },
        }
        done = subprocess.run(
            [sys.executable, "-c", REDEPLOY],
            input=json.dumps({"address": address, "document": changed}),
            env=host.environ(),
            capture_output=True,
            text=True,
            timeout=START_S,
        )
        assert done.returncode == 0, done.stderr[-2000:]


@contextmanager
def machine(
    folder: Path, pools: Sequence[dict[str, Any]], proxy: ProxyKind = "haproxy", router: bool = True
) -> Iterator[Machine]:
    """Starts a fleet of these pools and ends it."""
    config = folder / "config.yaml"
    config.write_text(yaml.safe_dump(document(pools)))
    serve = ServeSettings(proxy=proxy, grpc_port=0, http_port=0, drain_period_s=0.5)
    settings = LocalSettings(config=config, serve=serve, router=router, router_port=0, startup_timeout_s=START_S)
    with LocalFleet(settings) as fleet:
        yield Machine(fleet)
