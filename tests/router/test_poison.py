"""A request that kills the replica that works on it must not take the fleet down."""

import grpc
import pytest
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from deployments.router import poison
from deployments.router.poison import PoisonLog

from .fake_pool import REPLICA_DIED, Failure, FakePool
from .harness import eventually, failure_of, fleet, images, scrape
from .test_stream import answers, image_item

Code = grpc.StatusCode
DEADLY = b"DEADLY"


def fleet_of(count: int) -> list[FakePool]:
    return [FakePool(f"vision-{number}", deadly={DEADLY}) for number in range(count)]


async def test_it_is_given_up_after_two_replicas() -> None:
    pools = fleet_of(5)
    async with fleet(*pools, retry={"attempts": 10}, metrics_port=0) as started:
        error = await failure_of(started.stub.EncodeImages(images(DEADLY), timeout=20))
        assert error.code() is Code.UNAVAILABLE
        assert "2 replicas were lost while they worked on this request" in error.details()
        assert sum(pool.deaths for pool in pools) == 2
        # Each death was in another pool.
        assert max(pool.deaths for pool in pools) == 1
        metrics = await scrape(started)
        await started.stub.EncodeImages(images(b"harmless"), timeout=10)
    assert metrics['poisoned_total{when="found"}'] == 1.0


async def test_one_pool_loses_two_replicas_at_most() -> None:
    pools = fleet_of(1)
    async with fleet(*pools, retry={"attempts": 10}) as started:
        await failure_of(started.stub.EncodeImages(images(DEADLY), timeout=20))
        assert pools[0].deaths == 2


async def test_sent_again_it_is_refused_without_being_passed_on() -> None:
    pools = fleet_of(3)
    async with fleet(*pools, metrics_port=0, retry={"poison_s": 600.0}) as started:
        await failure_of(started.stub.EncodeImages(images(DEADLY), timeout=20))
        for _ in range(5):
            error = await failure_of(started.stub.EncodeImages(images(DEADLY), timeout=20))
            assert error.code() is Code.UNAVAILABLE
            status = rpc_status.from_call(error)
            info = error_details_pb2.RetryInfo()
            assert status is not None
            assert status.details[0].Unpack(info)
            # It says for how long, so that a client does not try before.
            assert 500 < info.retry_delay.seconds <= 600
        got = await answers(started, [image_item("a", DEADLY), image_item("b", b"harmless")])
        assert got["b"].HasField("embedding")
        assert got["a"].error.code == Code.UNAVAILABLE.value[0]
        metrics = await scrape(started)
    assert sum(pool.deaths for pool in pools) == 2
    assert metrics['poisoned_total{when="again"}'] >= 5.0


async def test_a_request_of_the_same_size_is_not_taken_for_it() -> None:
    async with fleet(*fleet_of(2)) as started:
        await failure_of(started.stub.EncodeImages(images(DEADLY), timeout=20))
        await started.stub.EncodeImages(images(b"SAFELY"), timeout=10)


async def test_the_memory_can_be_turned_off_and_the_bound_still_holds() -> None:
    pools = fleet_of(2)
    async with fleet(*pools, retry={"poison_s": 0.0}) as started:
        for _ in range(2):
            error = await failure_of(started.stub.EncodeImages(images(DEADLY), timeout=20))
            assert rpc_status.from_call(error) is None
        assert sum(pool.deaths for pool in pools) == 4


async def test_an_innocent_request_survives_one_death() -> None:
    first, second = FakePool("vision-a"), FakePool("vision-b")
    async with fleet(first, second) as started:
        for pool in (first, second):
            pool.failures.append(Failure(Code.INTERNAL, REPLICA_DIED))
            pool.released.clear()
        call = started.stub.EncodeImages(images(b"x"), timeout=20)
        await eventually(lambda: first.in_flight + second.in_flight == 1)
        other = second if first.in_flight else first
        other.failures.clear()
        for pool in (first, second):
            pool.released.set()
        assert (await call).provenance.pool == other.name


async def test_a_lost_connection_counts_as_a_death_and_a_refused_one_does_not() -> None:
    lost = Failure(Code.UNAVAILABLE, "recvmsg:Connection reset by peer")
    refused = Failure(Code.UNAVAILABLE, "failed to connect to all addresses; Connection refused")
    for failure, calls in ((lost, 2), (refused, 4)):
        pool = FakePool("vision-a")
        async with fleet(pool, retry={"attempts": 4}) as started:
            pool.failures.extend([failure] * 10)
            error = await failure_of(started.stub.EncodeImages(images(b"x"), timeout=20))
            assert error.code() is Code.UNAVAILABLE
            assert len(pool.requests) == calls


async def test_a_hedged_request_kills_no_more_than_two() -> None:
    pools = [FakePool(f"vision-{number}", deadly={DEADLY}, latency_s=0.3) for number in range(4)]
    async with fleet(*pools, retry={"attempts": 10}) as started:
        metadata = (("x-hedge-after-ms", "20"),)
        error = await failure_of(started.stub.EncodeImages(images(DEADLY), metadata=metadata, timeout=20))
        assert error.code() is Code.UNAVAILABLE
        assert sum(pool.deaths for pool in pools) == 2


class TestMemory:
    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> list[float]:
        now = [100.0]
        monkeypatch.setattr(poison.time, "monotonic", lambda: now[0])
        return now

    def test_each_time_it_refuses_for_twice_as_long(self, clock: list[float]) -> None:
        log = PoisonLog(5.0)
        for refused_s in (5.0, 10.0, 20.0, 40.0):
            assert log.remember(b"a") == refused_s
            assert log.refused_for_s(b"a") == refused_s
            assert log.refused_for_s(b"b") == 0.0
            clock[0] += refused_s - 1.0
            assert log.refused_for_s(b"a") == pytest.approx(1.0)
            clock[0] += 1.0
            assert log.refused_for_s(b"a") == 0.0
        for _ in range(2000):
            assert log.remember(b"a") <= 600.0
        assert log.refused_for_s(b"a") == 600.0

    def test_it_forgets_in_time(self, clock: list[float]) -> None:
        log = PoisonLog(5.0)
        log.remember(b"a")
        clock[0] += 5.0 + 599.0
        assert log.remember(b"a") == 10.0
        clock[0] += 10.0 + 600.0
        assert log.refused_for_s(b"a") == 0.0
        assert log.remember(b"a") == 5.0

    def test_it_remembers_so_many_and_the_newest(self, clock: list[float]) -> None:
        log = PoisonLog(10.0)
        for number in range(300):
            log.remember(b"%d" % number)
        assert log.refused_for_s(b"299") == 10.0
        assert log.refused_for_s(b"44") == 10.0
        assert log.refused_for_s(b"43") == 0.0
