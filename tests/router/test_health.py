"""Health: probes are real forwards, pools that fail them are not used, and grpc.health.v1 tells."""

import asyncio
import struct

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from deployments.router.probe import SIDE, probe_pixels, vector_fault
from encoder.v1 import encoder_pb2 as pb

from .fake_pool import Failure, FakePool, PoolServer
from .harness import NOWHERE, Fleet, eventually, failure_of, fleet, images

Code = grpc.StatusCode
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
SERVICE = "encoder.v1.EncoderService"
DOWN = Failure(Code.INTERNAL, "boom")


async def until_status(started: Fleet, service: str, expected: int) -> None:
    for _ in range(1000):
        if await started.status(service) == expected:
            return
        await asyncio.sleep(0.01)
    raise AssertionError(f"{service!r} never became {expected}")


async def test_all_is_serving_when_each_tower_has_a_healthy_pool() -> None:
    vision, text = FakePool("vision-cpu"), FakePool("text", tower="text")
    async with fleet(vision, text) as started:
        for service in ("", SERVICE, "vision-cpu", "text"):
            await until_status(started, service, SERVING)
        error = await failure_of(started.health.Check(health_pb2.HealthCheckRequest(service="other"), timeout=5))
        assert error.code() is Code.NOT_FOUND


async def test_nothing_is_serving_before_the_first_probe_has_passed() -> None:
    pool = FakePool("vision-cpu", hold_probes=True)
    async with fleet(pool, wait=False, health={"timeout_s": 600.0}) as started:
        for service in ("", SERVICE, "vision-cpu"):
            assert await started.status(service) == NOT_SERVING
        error = await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
        assert error.code() is Code.UNAVAILABLE


async def test_probes_are_real_requests() -> None:
    vision, text = FakePool("vision-cpu"), FakePool("text", tower="text")
    async with fleet(vision, text) as started:
        assert started.state("text").healthy
    image = pb.EncodeImagesRequest.FromString(vision.probes[0].request).images[0].pixels
    assert (image.height, image.width, image.channels, len(image.data)) == (SIDE, SIDE, 3, SIDE * SIDE * 3)
    assert list(pb.EncodeTextRequest.FromString(text.probes[0].request).texts) == ["a red circle"]
    assert vision.probes[0].metadata["application"] == "vision-cpu"
    assert vision.probes[0].time_remaining is not None
    assert vision.probes[0].time_remaining < 1.1


def test_the_probes_picture_has_no_constant_channel() -> None:
    pixels = np.frombuffer(probe_pixels(), np.uint8).reshape(SIDE, SIDE, 3)
    assert pixels[0, 0].tolist() == [0, 0, 0]
    assert pixels[SIDE - 1, 0].tolist() == [255, 0, (63 * 7) % 256]
    assert pixels[1, SIDE - 1].tolist() == [255 // 63, 255, (7 + 63 * 13) % 256]
    assert (pixels.reshape(-1, 3).std(axis=0) > 50).all()


async def test_a_failing_pool_goes_down_and_comes_back() -> None:
    first, second = FakePool("vision-a"), FakePool("vision-b")
    async with fleet(first, second, health={"traffic_counts": False}) as started:
        first.broken = DOWN
        await until_status(started, "vision-a", NOT_SERVING)
        # The tower is still served.
        assert await started.status() == SERVING
        assert await started.status("vision-b") == SERVING
        before = len(first.requests)
        for _ in range(5):
            answer = await started.stub.EncodeImages(images(b"x"), timeout=10)
            assert answer.provenance.pool == "vision-b"
        assert len(first.requests) == before
        error = await failure_of(started.stub.EncodeImages(images(b"x", pool="vision-a"), timeout=10))
        assert error.code() is Code.UNAVAILABLE

        second.broken = DOWN
        for service in ("", SERVICE, "vision-b"):
            await until_status(started, service, NOT_SERVING)
        error = await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
        assert error.code() is Code.UNAVAILABLE

        first.broken = None
        for service in ("", SERVICE, "vision-a"):
            await until_status(started, service, SERVING)
        assert await started.status("vision-b") == NOT_SERVING
        answer = await started.stub.EncodeImages(images(b"x"), timeout=10)
        assert answer.provenance.pool == "vision-a"


async def test_a_pool_goes_down_only_after_so_many_failures_in_a_row() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool, health={"failures": 3, "traffic_counts": False}) as started:
        for _ in range(2):
            seen = len(pool.probes)
            pool.broken = DOWN
            # When the second failing probe is there, the first one has been judged.
            await eventually(lambda seen=seen: len(pool.probes) >= seen + 2)
            assert len(pool.probes) == seen + 2
            assert started.state("vision-cpu").healthy
            pool.broken = None
            await eventually(lambda seen=seen: len(pool.probes) >= seen + 4)
        pool.broken = DOWN
        await eventually(lambda: not started.state("vision-cpu").healthy)


async def test_watch_tells_changes() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool) as started:
        watches = {
            name: started.health.Watch(health_pb2.HealthCheckRequest(service=name))
            for name in ("", SERVICE, "vision-cpu")
        }
        for state in (SERVING, NOT_SERVING, SERVING):
            pool.broken = DOWN if state == NOT_SERVING else None
            for watch in watches.values():
                assert (await asyncio.wait_for(watch.read(), 20)).status == state
        for watch in watches.values():
            watch.cancel()


async def test_a_hung_pool_goes_down_by_the_probes_timeout() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool, health={"timeout_s": 0.2}) as started:
        pool.hold_probes = True
        await until_status(started, "", NOT_SERVING)
        pool.hold_probes = False
        await until_status(started, "", SERVING)


async def test_a_probe_that_waits_behind_served_traffic_is_no_failure() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool, health={"timeout_s": 0.3, "traffic_counts": False}) as started:
        pool.hold_probes = True
        seen = len(pool.probes)
        while len(pool.probes) < seen + 5:
            await started.stub.EncodeImages(images(b"x"), timeout=10)
            await asyncio.sleep(0.02)
        assert started.state("vision-cpu").healthy
        await until_status(started, "", NOT_SERVING)


@pytest.mark.parametrize(
    ("vector", "listed"),
    [
        (np.zeros(8, np.float32), 8),
        (np.array([1, np.nan] * 4, np.float32), 8),
        (np.array([1, np.inf] * 4, np.float32), 8),
        (np.ones(4, np.float32), 8),
    ],
    ids=["zero", "nan", "infinite", "short"],
)
async def test_a_pool_that_computes_nonsense_is_never_used(vector: np.ndarray, listed: int) -> None:
    pool = FakePool("vision-cpu", vector=vector, listed_dimensions=listed)
    async with fleet(pool, wait=False) as started:
        await eventually(lambda: len(pool.probes) >= 3)
        assert await started.status() == NOT_SERVING
        error = await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
        assert error.code() is Code.UNAVAILABLE
        assert not pool.requests
        pool.vector = np.ones(8, np.float32)
        await until_status(started, "", SERVING)


def test_what_is_wrong_with_a_probes_answer() -> None:
    good = pb.Embedding(values=struct.pack("<2f", 0.0, 1.0), dtype=pb.EMBEDDING_DTYPE_FLOAT32, dimensions=2)

    def fault(dimensions: int = 0, count: int = 1, **changes: object) -> str:
        embedding = pb.Embedding()
        embedding.CopyFrom(good)
        for name, value in changes.items():
            setattr(embedding, name, value)
        return vector_fault(pb.EncodeImagesResponse(results=[pb.ImageResult(embedding=embedding)] * count), dimensions)

    assert fault() == ""
    assert fault(dimensions=2) == ""
    assert "8 bytes for 3" in fault(dimensions=3)
    assert "8 bytes for 3" in fault(dimensions=3, values=good.values)
    assert "2 results" in fault(count=2)
    assert "0 results" in fault(count=0)
    assert "dtype" in fault(dtype=pb.EMBEDDING_DTYPE_INT8)
    assert fault(values=good.values[:7])
    assert fault(values=b"", dimensions=0)
    error = pb.ImageResult()
    error.error.message = "cannot decode"
    assert "cannot decode" in vector_fault(pb.EncodeImagesResponse(results=[error]), 0)


async def test_a_busy_pool_is_not_a_broken_one() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool, health={"traffic_counts": False}) as started:
        pool.probe_failure = Failure(Code.RESOURCE_EXHAUSTED, "queue full")
        seen = len(pool.probes)
        await eventually(lambda: len(pool.probes) >= seen + 4)
        assert await started.status("vision-cpu") == SERVING
        await started.stub.EncodeImages(images(b"x"), timeout=10)


async def test_served_traffic_saves_probes_but_not_for_ever() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool, health={"interval_s": 0.3, "max_unprobed_s": 1.5, "recheck_s": 0.1}) as started:

        async def traffic(requests: int) -> int:
            before = len(pool.probes)
            for _ in range(requests):
                await started.stub.EncodeImages(images(b"x"), timeout=10)
                await asyncio.sleep(0.02)
            return len(pool.probes) - before

        # About 3 s: ten intervals, of which two are due although traffic flows.
        probes = await traffic(140)
        assert 1 <= probes <= 4
        # Items that all fail prove nothing.
        pool.bad_items = {b"x"}
        before = len(pool.probes)
        await traffic(60)
        assert len(pool.probes) - before >= 2


async def test_a_failed_call_brings_on_a_probe_at_once() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool, health={"interval_s": 600.0}) as started:
        seen = len(pool.probes)
        pool.failures.append(DOWN)
        await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
        await eventually(lambda: len(pool.probes) == seen + 1)
        # An error of the request does not.
        pool.failures.append(Failure(Code.INVALID_ARGUMENT, "no"))
        await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
        await asyncio.sleep(0.3)
        assert len(pool.probes) == seen + 1
        pool.broken = DOWN
        await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
        await eventually(lambda: not started.state("vision-cpu").healthy)


async def test_a_pool_that_is_not_there_at_the_start_joins_later() -> None:
    pool = FakePool("vision-late")
    async with PoolServer([]) as server:
        target = {"name": "vision-late", "address": server.address}
        async with fleet(FakePool("text", tower="text"), extra=[target]) as started:
            # Its tower is not known, so it does not count; and it is not said that there is no such pool.
            await until_status(started, "", SERVING)
            assert await started.status("vision-late") == NOT_SERVING
            error = await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
            assert error.code() is Code.UNAVAILABLE
            server.pools["vision-late"] = pool
            await until_status(started, "vision-late", SERVING)
            await started.stub.EncodeImages(images(b"x"), timeout=10)


async def test_a_tower_from_the_settings_counts_from_the_start() -> None:
    target = {"name": "vision-gone", "address": NOWHERE, "towers": ["vision"]}
    async with fleet(FakePool("text", tower="text"), extra=[target]) as started:
        assert await started.status("text") == SERVING
        assert await started.status("") == NOT_SERVING


async def test_a_pool_that_serves_another_tower_than_the_settings_say_is_not_used() -> None:
    pool = FakePool("vision-cpu")
    async with PoolServer([pool]) as server:
        target = {"name": "vision-cpu", "address": server.address, "towers": ["text"]}
        async with fleet(extra=[target], wait=False) as started:
            await eventually(lambda: "serves vision" in started.state("vision-cpu").reason)
            assert await started.status() == NOT_SERVING
    assert not pool.probes


async def test_failed_calls_do_not_bring_on_probes_without_end() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool, health={"interval_s": 600.0, "recheck_s": 1.0}) as started:
        seen = len(pool.probes)
        pool.failures.extend([DOWN] * 40)
        for _ in range(40):
            await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
            await asyncio.sleep(0.05)
        # About 2 s, one probe a second.
        assert 1 <= len(pool.probes) - seen <= 4


async def test_another_model_is_noticed_when_the_pool_is_asked_again() -> None:
    pool = FakePool("vision-cpu", model="clip")
    async with fleet(pool, health={"refresh_s": 0.1}) as started:
        pool.model = "siglip"
        await eventually(lambda: started.state("vision-cpu").models == {"vision": frozenset({"siglip"})})
        await started.stub.EncodeImages(images(b"x", model="siglip"), timeout=10)


async def test_vectors_of_another_length_make_the_router_ask_again() -> None:
    pool = FakePool("vision-cpu", model="clip")
    # A pool that is down is asked anyway; this one does not go down.
    health = {"refresh_s": 600.0, "traffic_counts": False, "failures": 1000}
    async with fleet(pool, health=health) as started:
        pool.model, pool.dimensions = "siglip", 4
        await eventually(lambda: started.state("vision-cpu").models == {"vision": frozenset({"siglip"})})
        answer = await started.stub.EncodeImages(images(b"x"), timeout=10)
        assert answer.results[0].embedding.dimensions == 4
