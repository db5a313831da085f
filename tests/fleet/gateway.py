"""A router with settings of the test's own, before the Serve of a running fleet."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from tests.fleet.conftest import SIZES, TEXT
from tests.fleet.machine import START_S, Machine
from tests.router.harness import Fleet, eventually
from tests.router.harness import fleet as router_before

# A machine under load answers late.
PATIENT: dict[str, Any] = {
    "health": {"interval_s": 2.0, "timeout_s": 30.0, "recheck_s": 0.5},
    "agreement": {"timeout_s": 60.0, "recheck_s": 1.0},
    "metrics_port": 0,
}


@asynccontextmanager
async def gateway(fleet: Machine, **settings: Any) -> AsyncIterator[Fleet]:
    """Gives it when all pools are healthy and none is in quarantine."""
    targets = [
        {"name": name, "address": fleet.fleet.addresses.serve_grpc, "towers": ["text" if name == TEXT else "vision"]}
        for name in SIZES
    ]
    async with router_before(extra=targets, wait=False, **{**PATIENT, **settings}) as started:
        states = [started.state(name) for name in SIZES]
        await eventually(lambda: all(state.healthy and not state.quarantine for state in states), START_S)
        yield started
