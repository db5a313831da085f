"""What the router costs: a trivial pool, asked straight and through a router, each in a process of its own."""

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from benchmarks.plan import ROOT, Plan, carry_out
from benchmarks.results import arguments_of, publish, say

TITLE = "The router in front of a trivial pool, requests of 100 KB"
POOL = "vision-cpu"
PAYLOAD = 100_000
START_TIMEOUT_S = 120.0


@contextmanager
def listening(arguments: Sequence[str]) -> Iterator[tuple[int, str]]:
    """A process that says `listening on HOST:PORT`: its pid and that address; ended with the block."""
    process = subprocess.Popen(
        [sys.executable, *arguments], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline().strip()
        if not line.startswith("listening on "):
            raise RuntimeError(f"{' '.join(arguments[:2])} did not start: it said {line!r}")
        yield process.pid, line.removeprefix("listening on ")
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_until_serving(address: str) -> None:
    """Raises RuntimeError when the router's health stays bad."""
    until = time.monotonic() + START_TIMEOUT_S
    with grpc.insecure_channel(address) as channel:
        stub = health_pb2_grpc.HealthStub(channel)
        while time.monotonic() < until:
            try:
                answer = stub.Check(health_pb2.HealthCheckRequest(), timeout=2.0)
            except grpc.RpcError:
                answer = None
            if answer is not None and answer.status == health_pb2.HealthCheckResponse.SERVING:
                return
            time.sleep(0.2)
    raise RuntimeError(f"the router at {address} does not serve after {START_TIMEOUT_S:g} s")


def router_settings(pool: str) -> str:
    """As a fleet's: one pool, on a free port."""
    return json.dumps({"port": 0, "pools": [{"name": POOL, "address": pool, "towers": ["vision"]}]})


def plans_of(options: argparse.Namespace, ways: dict[str, Plan]) -> list[Plan]:
    """One client by turns straight and through the router, round after round; then many clients each way."""
    alone = [
        replace(base, name=f"{way}, 1 client, round {turn + 1}", seconds=options.seconds)
        for turn in range(options.rounds)
        for way, base in ways.items()
    ]
    crowd = [
        replace(base, name=f"{way}, {clients} clients", clients=clients, seconds=2 * options.seconds)
        for clients in options.clients
        for way, base in ways.items()
    ]
    return alone + crowd


def main() -> None:
    """Prints and writes router.json."""
    parser = arguments_of(__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[16, 64], help="for the rate at saturation")
    parser.add_argument("--rounds", type=int, default=3, help="of one client each way")
    parser.add_argument("--seconds", type=float, default=3.0, help="a round; twice that for each rate")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []
    with listening(["-m", "benchmarks.trivial_pool", POOL]) as (pool_pid, pool):
        say(f"a trivial pool at {pool}")
        with listening(["-m", "deployments.router", "--settings", router_settings(pool)]) as (router_pid, router):
            wait_until_serving(router)
            base = Plan("", pool, payload=PAYLOAD, warmup=1.0, processes={"pool": [pool_pid], "router": [router_pid]})
            ways = {"straight": replace(base, application=POOL), "router": replace(base, address=router)}
            for plan, row in zip(plans_of(options, ways), carry_out(plans_of(options, ways)), strict=True):
                cores = {f"{role} cores": value for role, value in row["cores"].items()}
                shown = {key: row[key] for key in ("load", "clients", "p50 ms", "p95 ms", "p99 ms", "errors")}
                way, shown["load"] = plan.name.split(", ", 1)
                rows.append({"way": way} | shown | {"requests/s": row["items/s"]} | cores)
    publish("router", TITLE, rows, folder=options.folder, figures=figures_of(rows), cores=os.cpu_count())


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The median of the rounds' p50 each way, and the best rate each way."""
    p50 = {
        way: statistics.median(row["p50 ms"] for row in rows if row["way"] == way and row["clients"] == 1)
        for way in ("straight", "router")
    }
    best = {way: max(row["requests/s"] for row in rows if row["way"] == way) for way in ("straight", "router")}
    return {
        "straight p50 ms": p50["straight"],
        "router p50 ms": p50["router"],
        "router overhead ms": p50["router"] - p50["straight"],
        "straight requests/s": best["straight"],
        "router requests/s": best["router"],
        "router over straight": best["router"] / best["straight"],
    }


if __name__ == "__main__":
    main()
