"""The client process of the service benchmarks: plans as JSON lines in, a JSON line for each out.

Requests are serialised ahead and answers are parsed, so the client's own share of the processor is small. Each client
has a connection of its own.
"""

import argparse
import asyncio
import itertools
import json
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import psutil

from benchmarks.plan import Plan
from benchmarks.speakers import Answer, Speaker, connect, requests_of

FEW = 8
PERCENTILES = {"p50 ms": 50.0, "p95 ms": 95.0, "p99 ms": 99.0}


class Ledger:
    """What came back: one entry an answer, and the first thing that went wrong."""

    def __init__(self) -> None:
        self.at: list[float] = []
        self.latency: list[float] = []
        self.items: list[int] = []
        self.stages: Counter[str] = Counter()
        self.errors = 0
        self.first_error = ""

    def enter(self, begun: float, answer: Answer) -> None:
        now = time.perf_counter()
        self.at.append(now)
        self.latency.append(now - begun)
        self.items.append(answer.items)
        self.stages.update(answer.stages)

    def fail(self, error: Exception) -> None:
        self.errors += 1
        self.first_error = self.first_error or " ".join(f"{type(error).__name__}: {error}".split())[:300]


class Load:
    """One plan under way."""

    def __init__(self, plan: Plan, speakers: Sequence[Speaker], requests: Sequence[bytes]) -> None:
        self._plan = plan
        self._speakers = speakers
        self._requests = itertools.cycle(requests)
        self._ledger = Ledger()
        self._asked = 0

    async def run(self) -> dict[str, Any]:
        arrivals = self._open() if self._plan.rate else self._closed()
        running = asyncio.create_task(arrivals)
        await asyncio.sleep(self._plan.warmup)
        self._ledger = Ledger()  # what was under way then counts, what was answered before does not
        cpu, began = cpu_seconds(self._plan.processes), time.perf_counter()
        await asyncio.wait({running}, timeout=self._plan.seconds)
        took = time.perf_counter() - began
        spent = cpu_seconds(self._plan.processes)
        ledger, self._ledger = self._ledger, Ledger()
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        return row_of(self._plan, ledger, took, {role: (spent[role] - cpu[role]) / took for role in spent})

    async def _closed(self) -> None:
        async with asyncio.TaskGroup() as group:
            for speaker in self._speakers:
                group.create_task(self._client(speaker))

    async def _client(self, speaker: Speaker) -> None:
        while self._takes_more():
            if not await self._ask(speaker, time.perf_counter()):
                await asyncio.sleep(0.05)  # a service that refuses is not hammered

    async def _open(self) -> None:
        """Poisson arrivals; latency counts from when a request was due, so a late client hides nothing."""
        gaps = np.random.default_rng(0)
        speakers = itertools.cycle(self._speakers)
        due = time.perf_counter()
        async with asyncio.TaskGroup() as group:
            while self._takes_more():
                due += float(gaps.exponential(1.0 / self._plan.rate))
                await asyncio.sleep(max(0.0, due - time.perf_counter()))
                group.create_task(self._ask(next(speakers), due))

    def _takes_more(self) -> bool:
        if self._plan.most_items and self._asked >= self._plan.most_items:
            return False
        self._asked += self._plan.items
        return True

    async def _ask(self, speaker: Speaker, begun: float) -> bool:
        try:
            answer = await speaker.ask(next(self._requests))
        except Exception as error:
            self._ledger.fail(error)
            return False
        self._ledger.enter(begun, answer)
        return True


def row_of(plan: Plan, ledger: Ledger, took: float, cores: Mapping[str, float]) -> dict[str, Any]:
    """The figures of one load; `cores`: processor seconds a second, by role."""
    latency = np.array(ledger.latency or [float("nan")]) * 1e3
    answers = max(1, len(ledger.at))
    # Of a single burst the slope would be that of its answers, which took their time before it.
    lasting = len(ledger.at) >= FEW and ledger.at[-1] - ledger.at[0] >= took / 2
    if plan.rate or lasting:
        rate = slope(ledger.at, ledger.items) if len(ledger.at) > 1 else sum(ledger.items) / took
    else:  # of a closed loop: what is under way over how long it takes
        rate = plan.clients * plan.items / float(np.mean(latency)) * 1e3
    return {
        "load": plan.name,
        "clients": plan.clients,
        "items a request": plan.items,
        "items/s": rate,
        "answers": len(ledger.at),
        **{name: float(np.percentile(latency, share)) for name, share in PERCENTILES.items()},
        "errors": ledger.errors,
        "first error": ledger.first_error,
        "cores": dict(cores),
        "stages": {name: total / answers for name, total in ledger.stages.items()},
    }


def slope(at: Sequence[float], items: Sequence[int]) -> float:
    """Items a second: least squares through the running total.

    Answers come in bursts of a batch; counting them in a window would be off by up to one burst at each end.
    """
    times = np.asarray(at) - at[0]
    if times[-1] <= 0:
        return float("nan")
    return float(np.polyfit(times, np.cumsum(items), 1)[0])


def cpu_seconds(processes: Mapping[str, Sequence[int]]) -> dict[str, float]:
    """Processor seconds of each role so far, and of this process as `client`; one that is gone counts as 0."""
    totals = {"client": sum(psutil.Process().cpu_times()[:2])}
    for role, pids in processes.items():
        totals[role] = sum(_cpu_of(pid) for pid in pids)
    return totals


def _cpu_of(pid: int) -> float:
    try:
        return float(sum(psutil.Process(pid).cpu_times()[:2]))
    except psutil.Error:
        return 0.0


async def measure(plan: Plan) -> dict[str, Any]:
    """One plan from connecting to closing."""
    requests = requests_of(plan)
    async with connect(plan) as speakers:
        return await Load(plan, speakers, requests).run()


async def measure_all(plans: Sequence[Plan]) -> None:
    """On one loop, since gRPC's poller belongs to it."""
    for plan in plans:
        print(json.dumps(await measure(plan)), flush=True)


def main() -> None:
    """Reads plans from standard input until its end."""
    argparse.ArgumentParser(description=__doc__).parse_args()
    plans = [Plan(**json.loads(line)) for line in sys.stdin.read().splitlines()]
    asyncio.run(measure_all(plans))


if __name__ == "__main__":
    main()
