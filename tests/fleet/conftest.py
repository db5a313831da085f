"""The fleet that the tests of this folder share: once behind HAProxy, once behind Serve's stock proxy."""

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from encoder.client import EncoderClient
from tests.fleet.load import PATIENT, Load, Oracle
from tests.fleet.machine import Machine, machine, pool

NPU, CPU, TEXT = "vision-npu", "vision-cpu", "text"
# Replicas of each pool.
SIZES = {NPU: 2, CPU: 1, TEXT: 1}
# So that a request may be too big for a pool and not for the router.
POOL_BYTES = 2 * 1024 * 1024

REPLICA_PROCESS = "ray::ServeReplica"


def pools(**changes: Any) -> list[dict[str, Any]]:
    """Two replicas on made-up NPUs, one on the CPU, one for texts."""
    common = {"max_request_bytes": POOL_BYTES, "drain_timeout_s": 5.0, **changes}
    return [
        pool(NPU, num_replicas=SIZES[NPU], resources={"NPU": 1}, **common),
        pool(CPU, num_replicas=SIZES[CPU], **common),
        pool(TEXT, tower="text", num_replicas=SIZES[TEXT], **common),
    ]


@pytest.fixture(scope="session", params=["haproxy", "stock"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with machine(tmp_path_factory.mktemp("fleet"), pools(), proxy=request.param) as started:
        yield started


@pytest.fixture(scope="session")
def oracle() -> Oracle:
    return Oracle.compute()


@pytest.fixture
def whole_fleet(fleet: Machine) -> Machine:
    """The fleet, when all its replicas answer."""
    fleet.until(lambda: sizes(fleet) == SIZES, "a whole fleet")
    return fleet


@pytest.fixture
def load(whole_fleet: Machine, oracle: Oracle) -> Load:
    """Starts from a whole fleet."""
    return Load(whole_fleet.router, oracle)


def sizes(fleet: Machine) -> dict[str, int]:
    """Replicas of each pool that answer now."""
    return {name: len(fleet.replicas(name)) for name in SIZES}


def assert_whole(fleet: Machine) -> None:
    """The router's report names every replica with its node and pool: all of them, and no process is left over."""
    fleet.until(lambda: sizes(fleet) == SIZES, "a whole fleet")
    fleet.until(lambda: len(fleet.named(REPLICA_PROCESS, starts=True)) == sum(SIZES.values()), "no replica left over")
    with EncoderClient(fleet.router, timeout=60, retries=PATIENT) as client:
        report = client.backend_report()
    assert not report.unreachable
    assert Counter(replica.pool for replica in report.replicas) == SIZES
    assert all(replica.node and replica.replica for replica in report.replicas)
    assert len({replica.replica for replica in report.replicas}) == sum(SIZES.values())
    assert {replica.pid for replica in report.replicas} == set(fleet.named(REPLICA_PROCESS, starts=True))
    for replica in report.replicas:
        print(f"pool={replica.pool} replica={replica.replica} node={replica.node} pid={replica.pid}")
