"""A fleet that loses processes under load: the client sees none of it within its deadline.

The same suite behind HAProxy and behind Serve's stock proxy. The router's failover hides a lost replica; while the only
proxy of the only node is away, the client's own retries do.
"""

import signal
import threading
import time
from collections.abc import Iterator
from typing import Any

import grpc
import pytest

from encoder.client import EncoderClient
from encoder.v1 import encoder_pb2 as pb
from encoder.v1 import encoder_pb2_grpc
from tests.fleet.load import PATIENT, Load, Oracle, pictures
from tests.fleet.machine import Machine, machine, pool

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1800)]
NPU, CPU, TEXT = "vision-npu", "vision-cpu", "text"
KILL_EVERY_S = 5.0


def pools(**changes: Any) -> list[dict[str, Any]]:
    """Two replicas on made-up NPUs, one on the CPU, one for texts."""
    return [
        pool(NPU, num_replicas=2, resources={"NPU": 1}, **changes),
        pool(CPU, num_replicas=1, **changes),
        pool(TEXT, tower="text", num_replicas=1, **changes),
    ]


@pytest.fixture(scope="module", params=["haproxy", "stock"])
def fleet(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Machine]:
    with machine(tmp_path_factory.mktemp("fleet"), pools(), proxy=request.param) as started:
        yield started


@pytest.fixture(scope="module")
def oracle() -> Oracle:
    return Oracle.compute()


@pytest.fixture
def load(fleet: Machine, oracle: Oracle) -> Load:
    """Starts from a whole fleet."""
    fleet.until(lambda: all(len(fleet.replicas(name)) == size for name, size in SIZES.items()), "a whole fleet")
    return Load(fleet.router, oracle)


SIZES = {NPU: 2, CPU: 1, TEXT: 1}


def test_calls_go_where_they_belong_and_pins_hold(fleet: Machine, oracle: Oracle, load: Load) -> None:
    """The provenance of each answer names its pool."""
    with grpc.insecure_channel(fleet.router) as channel:
        stub = encoder_pb2_grpc.EncoderServiceStub(channel)
        images = [pb.Image(encoded=content) for content in pictures()]
        for name in (NPU, CPU):
            request = pb.EncodeImagesRequest(images=images, options=pb.EncodeOptions(pool=name))
            answers = [stub.EncodeImages(request, timeout=60) for _ in range(10)]
            assert {answer.provenance.pool for answer in answers} == {name}
        texts = [stub.EncodeText(pb.EncodeTextRequest(texts=["a red circle"]), timeout=60) for _ in range(20)]
        assert {answer.provenance.pool for answer in texts} == {TEXT}
        pinned = pb.EncodeTextRequest(texts=["a"], options=pb.EncodeOptions(pool=CPU))
        with pytest.raises(grpc.RpcError) as refused:
            stub.EncodeText(pinned, timeout=60)
        assert refused.value.code() is grpc.StatusCode.FAILED_PRECONDITION


def test_a_killed_replica_is_not_noticed(fleet: Machine, load: Load) -> None:
    before = fleet.replicas(NPU)
    with load.running():
        fleet.kill(min(before.values()))
        fleet.until(lambda: _replaced(fleet, NPU, before, 2, lost=1), "the replica is replaced")


def test_a_stalled_replica_is_replaced_and_its_calls_are_answered_elsewhere(fleet: Machine, load: Load) -> None:
    before = fleet.replicas(NPU)
    stalled = min(before.values())
    with load.running():
        fleet.kill(stalled, signal.SIGSTOP)
        try:
            fleet.until(lambda: _replaced(fleet, NPU, before, 2, lost=1), "the replica is replaced")
        finally:
            if fleet.has(stalled):
                fleet.kill(stalled, signal.SIGCONT)


def test_a_killed_proxy_is_not_noticed(fleet: Machine, load: Load, request: pytest.FixtureRequest) -> None:
    name = "haproxy" if "haproxy" in request.node.name else "ray::ProxyActor"
    before = fleet.named(name)
    assert before
    with load.running() as tally:
        for pid in filter(fleet.has, before):
            fleet.kill(pid)
        fleet.until(lambda: bool(set(fleet.named(name)) - set(before)), "the proxy is started again")
        done = sum(tally.right.values())
        fleet.until(lambda: sum(tally.right.values()) > done + 100, "calls are answered again")


def test_a_rolling_update_is_not_noticed(fleet: Machine, load: Load) -> None:
    before = {name: fleet.replicas(name) for name in SIZES}
    with load.running():
        fleet.redeploy(pools(max_stream_items=32))
        for name, size in SIZES.items():
            fleet.until(lambda: _replaced(fleet, name, before[name], size, lost=size), f"{name} is new")  # noqa: B023


def _replaced(fleet: Machine, pool: str, before: dict[str, int], size: int, lost: int) -> bool:
    now = fleet.replicas(pool)
    return len(now) == size and len(set(before) - set(now)) >= lost


def test_10000_pictures_while_a_replica_is_killed_every_5_s(fleet: Machine, load: Load) -> None:
    done, kills = threading.Event(), [0]

    def kill() -> None:
        while not done.wait(KILL_EVERY_S):
            alive = [pid for name in (NPU, CPU) for pid in fleet.replicas(name).values() if fleet.has(pid)]
            if alive:
                fleet.kill(alive[kills[0] % len(alive)])
                kills[0] += 1

    killer = threading.Thread(target=kill)
    killer.start()
    started = time.monotonic()
    try:
        tally = load.send_pictures(10_000, batch=16, callers=4)
    finally:
        done.set()
        killer.join()
    print(f"{kills[0]} kills in {time.monotonic() - started:.0f} s")
    assert (tally.right["images"], tally.wrong, tally.errors) == (10_000, 0, [])
    assert kills[0] >= 2


def test_afterwards_the_fleet_is_whole(fleet: Machine, load: Load) -> None:
    with EncoderClient(fleet.router, timeout=60, retries=PATIENT) as client:
        report = client.backend_report()
    assert {replica.pool for replica in report.replicas} == set(SIZES)
    assert all(replica.node and replica.replica for replica in report.replicas)
