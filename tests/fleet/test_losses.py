"""A fleet that loses processes under load: the client sees none of it within its deadline.

The same suite behind HAProxy and behind Serve's stock proxy. The router's failover hides a lost replica; while the only
proxy of the only node is away, the client's own retries do.
"""

import threading
import time

import grpc
import pytest

from encoder.v1 import encoder_pb2 as pb
from encoder.v1 import encoder_pb2_grpc
from tests.fleet.conftest import CPU, NPU, SIZES, TEXT, assert_whole, pools
from tests.fleet.load import Load, Oracle, pictures
from tests.fleet.machine import Machine

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1800)]
KILL_EVERY_S = 5.0


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
        fleet.until(lambda: fleet.replaced(NPU, before, 2, lost=1), "the replica is replaced")


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
            fleet.until(lambda: fleet.replaced(name, before[name], size, lost=size), f"{name} is new")  # noqa: B023


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
    seconds = time.monotonic() - started
    print(
        f"{kills[0]} kills in {seconds:.0f} s: {dict(tally.right)} right, {tally.wrong} wrong, {len(tally.errors)} lost"
    )
    assert (tally.right["images"], tally.wrong, tally.errors) == (10_000, 0, [])
    assert kills[0] >= 2


def test_afterwards_the_fleet_is_whole(fleet: Machine, load: Load) -> None:
    assert_whole(fleet)
