"""What one measurement of a service asks for, and the client process that carries it out."""

import json
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from benchmarks.results import say

ROOT = Path(__file__).resolve().parents[1]


class LoadFailed(Exception):
    """The client process ended before its plans were done."""


@dataclass(frozen=True)
class Plan:
    """One load: a closed loop of `clients`, or, with a `rate` of requests a second, open arrivals.

    application: Serve's metadata, for calls that go past the router. model: as HTTP peers want it named.
    most_items: ends the load after so many items, 0 for no such end. payload: bytes of a request's only item, which is
    noise instead of a picture then. processes: role to pids, whose CPU time is told of.
    """

    name: str
    address: str
    protocol: Literal["grpc", "http"] = "grpc"
    kind: Literal["image", "text"] = "image"
    application: str = ""
    model: str = ""
    clients: int = 1
    items: int = 1
    rate: float = 0.0
    seconds: float = 8.0
    warmup: float = 2.0
    most_items: int = 0
    width: int = 640
    height: int = 480
    payload: int = 0
    processes: Mapping[str, Sequence[int]] = field(default_factory=dict)

    @property
    def longest_s(self) -> float:
        """After so many seconds something hangs."""
        return self.warmup + self.seconds + 180.0


def carry_out(plans: Sequence[Plan]) -> Iterator[dict[str, Any]]:
    """A row for each plan as soon as it is done, from one client process for all of them; raises LoadFailed."""
    order = "".join(json.dumps(asdict(plan)) + "\n" for plan in plans)
    client = subprocess.Popen(
        [sys.executable, "-m", "benchmarks.load"], cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert client.stdin is not None and client.stdout is not None
    try:
        client.stdin.write(order)
        client.stdin.close()
        for plan in plans:
            line = client.stdout.readline()
            if not line:
                raise LoadFailed(f"the client process ended during {plan.name!r} with status {client.wait(10)}")
            row = json.loads(line)
            say(f"  {plan.name}: {row['items/s']:.1f} items/s, p50 {row['p50 ms']:.1f} ms{_trouble(row)}")
            yield row
    finally:
        client.kill()
        client.wait()


def load(plan: Plan) -> dict[str, Any]:
    """The row of a single plan."""
    return next(iter(list(carry_out([plan]))))


def _trouble(row: Mapping[str, Any]) -> str:
    return f", {row['errors']} errors: {row['first error']}" if row["errors"] else ""
