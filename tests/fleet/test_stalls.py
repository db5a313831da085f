"""Replicas that stall: Serve's health check finds them and replaces them, and their calls are answered elsewhere."""

import signal
from pathlib import Path

import pytest

from tests.fleet import stuck
from tests.fleet.conftest import NPU, SIZES, assert_whole, pools
from tests.fleet.load import Load
from tests.fleet.machine import Machine

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1800)]


def test_a_stopped_replica_is_replaced_and_its_calls_are_answered_elsewhere(fleet: Machine, load: Load) -> None:
    before = fleet.replicas(NPU)
    name, pid = min(before.items())
    with load.running():
        fleet.kill(pid, signal.SIGSTOP)
        try:
            fleet.until(lambda: fleet.replaced(NPU, before, SIZES[NPU], lost=1), "the replica is replaced")
        finally:
            if fleet.has(pid):
                fleet.kill(pid, signal.SIGCONT)
    assert name not in fleet.replicas(NPU)
    assert fleet.found_unhealthy(name)
    assert_whole(fleet)


def test_a_stuck_forward_is_replaced_and_its_calls_are_answered_elsewhere(
    fleet: Machine, load: Load, tmp_path: Path
) -> None:
    """Its process lives and answers; the forward alone hangs."""
    args = [one | ({"stuck_folder": str(tmp_path)} if one["name"] == NPU else {}) for one in pools()]
    first = fleet.replicas(NPU)
    fleet.redeploy(args, builders={NPU: stuck.BUILDER})
    fleet.until(lambda: fleet.replaced(NPU, first, SIZES[NPU], lost=SIZES[NPU]), "the pool is new")
    before = fleet.replicas(NPU)
    name, pid = min(before.items())
    with load.running():
        (tmp_path / str(pid)).touch()
        fleet.until(lambda: fleet.replaced(NPU, before, SIZES[NPU], lost=1), "the replica is replaced")
    assert name not in fleet.replicas(NPU)
    assert fleet.found_unhealthy(name)
    assert "a forward thread has not answered" in fleet.controller_log()
    assert_whole(fleet)
