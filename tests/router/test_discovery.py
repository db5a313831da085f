"""Pools found by asking Serve: they join, leave, and no call is dropped for it."""

import asyncio
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2

from deployments.router.discovery import LIST_APPLICATIONS
from deployments.router.envelope import MalformedRequest, strings_of

from .fake_pool import Failure, FakePool, PoolServer
from .harness import Fleet, eventually, failure_of, fleet, images, scrape, texts

Code = grpc.StatusCode
SERVING = health_pb2.HealthCheckResponse.SERVING


@asynccontextmanager
async def discovering(
    *pools: FakePool, found: dict[str, Any] | None = None, extra: tuple[dict[str, object], ...] = (), **overrides: Any
) -> AsyncIterator[tuple[Fleet, PoolServer]]:
    """A router that finds the applications of one Serve."""
    async with PoolServer(pools) as serve:
        settings = {"address": serve.address, "interval_s": 0.05, **(found or {})}
        async with fleet(extra=extra, wait=False, discovery=settings, **overrides) as started:
            yield started, serve


async def until_known(started: Fleet, *names: str) -> None:
    """Until there are exactly these pools, all healthy."""
    await eventually(lambda: set(started.router.pools.by_name) == set(names))
    await started.until_healthy(*names)


def test_the_answer_is_read_as_serve_writes_it() -> None:
    serve_pb2 = pytest.importorskip("ray.serve.generated.serve_pb2")
    names = ["vision-cpu", "text", "ünïcode", ""]
    answer = serve_pb2.ListApplicationsResponse(application_names=names).SerializeToString()
    assert strings_of(answer, 1) == names
    assert strings_of(b"", 1) == []
    service = serve_pb2.DESCRIPTOR.services_by_name["RayServeAPIService"]
    method = service.methods_by_name["ListApplications"]
    assert f"/{service.full_name}/{method.name}" == LIST_APPLICATIONS
    assert serve_pb2.ListApplicationsRequest().SerializeToString() == b""


@pytest.mark.parametrize("answer", [b"\x0a\x02\xff\xfe", b"\x0a\x05ab"])
def test_what_is_no_such_answer_is_refused(answer: bytes) -> None:
    with pytest.raises(MalformedRequest):
        strings_of(answer, 1)


async def test_applications_are_found_probed_and_used() -> None:
    vision, text = FakePool("vision-cpu"), FakePool("text", tower="text")
    async with discovering(vision, text) as (started, _):
        await until_known(started, "vision-cpu", "text")
        answer = await started.stub.EncodeImages(images(b"x"), timeout=10)
        assert answer.provenance.pool == "vision-cpu"
        await started.stub.EncodeText(texts("x"), timeout=10)
        for service in ("", "vision-cpu", "text"):
            assert await started.status(service) == SERVING
    assert vision.probes
    assert vision.goldens


async def test_before_anything_was_found_calls_may_be_tried_again() -> None:
    async with discovering() as (started, serve):
        await eventually(lambda: serve.listings >= 2)
        error = await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
        assert error.code() is Code.UNAVAILABLE
        assert await started.status() != SERVING
        serve.pools["vision-late"] = FakePool("vision-late")
        await until_known(started, "vision-late")
        await started.stub.EncodeImages(images(b"x"), timeout=10)
        # Of another tower there is nothing yet.
        error = await failure_of(started.stub.EncodeText(texts("x"), timeout=10))
        assert error.code() is Code.UNAVAILABLE


async def test_pools_that_join_are_held_against_the_fleet() -> None:
    async with discovering(FakePool("vision-a")) as (started, serve):
        await until_known(started, "vision-a")
        serve.pools["vision-b"] = FakePool("vision-b", cosine=0.5)
        await until_known(started, "vision-a", "vision-b")
        assert started.state("vision-b").quarantine
        serve.pools["vision-c"] = FakePool("vision-c")
        await until_known(started, "vision-a", "vision-b", "vision-c")
        for _ in range(5):
            answer = await started.stub.EncodeImages(images(b"x"), timeout=10)
            assert answer.provenance.pool != "vision-b"


async def test_a_pool_that_leaves_finishes_what_it_has_and_gets_no_more(lines: io.StringIO) -> None:
    leaving, staying = FakePool("vision-a"), FakePool("vision-b", latency_s=0.05)
    async with discovering(leaving, staying, metrics_port=0) as (started, serve):
        await until_known(started, "vision-a", "vision-b")
        leaving.released.clear()
        under_way = [started.stub.EncodeImages(images(b"x", pool="vision-a"), timeout=30) for _ in range(3)]
        await eventually(lambda: leaving.in_flight == 3)
        gone = serve.pools.pop("vision-a")
        await eventually(lambda: "vision-a" not in started.router.pools.by_name)
        for _ in range(5):
            answer = await started.stub.EncodeImages(images(b"x"), timeout=10)
            assert answer.provenance.pool == "vision-b"
        error = await failure_of(started.stub.EncodeImages(images(b"x", pool="vision-a"), timeout=10))
        assert error.code() is Code.NOT_FOUND
        health = await started.health.Check(health_pb2.HealthCheckRequest(service="vision-a"), timeout=5)
        assert health.status == health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
        metrics = await scrape(started)
        assert 'pool_healthy{pool="vision-a"}' not in metrics
        assert metrics['pool_healthy{pool="vision-b"}'] == 1.0
        assert gone.in_flight == 3
        leaving.released.set()
        for call in under_way:
            assert (await call).results[0].HasField("embedding")
        await eventually(lambda: not started.router._roster._leaving)
        # It may come again.
        serve.pools["vision-a"] = leaving
        await until_known(started, "vision-a", "vision-b")
        await started.stub.EncodeImages(images(b"x", pool="vision-a"), timeout=10)
    told = [json.loads(line) for line in lines.getvalue().splitlines()]
    assert [line["pool"] for line in told if line["event"] == "pool_gone"] == ["vision-a"]
    assert [line["pool"] for line in told if line["event"] == "pool_found"] == ["vision-a", "vision-b", "vision-a"]


async def test_no_call_fails_while_applications_come_and_go() -> None:
    # The other one is quicker, so that it is used when it is there.
    stable = FakePool("vision-stable", latency_s=0.05)
    async with discovering(stable) as (started, serve):
        await until_known(started, "vision-stable")
        stop = asyncio.Event()
        answered = 0

        async def client() -> None:
            nonlocal answered
            while not stop.is_set():
                answer = await started.stub.EncodeImages(images(b"x"), timeout=30)
                assert answer.results[0].HasField("embedding")
                answered += 1

        clients = [asyncio.create_task(client()) for _ in range(4)]
        other = FakePool("vision-other", latency_s=0.005)
        for _ in range(3):
            serve.pools["vision-other"] = other
            await until_known(started, "vision-stable", "vision-other")
            seen = len(other.requests)
            await eventually(lambda seen=seen: len(other.requests) > seen)
            # Serve stops naming it first, and lets what is under way end: so does the fake.
            listed = dict(serve.pools)
            serve.listed = [name for name in listed if name != "vision-other"]
            await eventually(lambda: "vision-other" not in started.router.pools.by_name)
            serve.listed = None
            del serve.pools["vision-other"]
            await eventually(lambda: other.in_flight == 0)
        stop.set()
        await asyncio.gather(*clients)
        assert answered > 20


async def test_an_answer_that_lacks_a_pool_once_does_not_make_it_leave() -> None:
    async with discovering(FakePool("vision-a"), found={"gone_after": 3, "interval_s": 0.1}) as (started, serve):
        await until_known(started, "vision-a")
        pool = started.state("vision-a")
        for _ in range(3):
            asked = serve.listings
            serve.listed = []
            await eventually(lambda asked=asked: serve.listings >= asked + 2)
            serve.listed = None
            asked = serve.listings
            await eventually(lambda asked=asked: serve.listings >= asked + 2)
            assert started.state("vision-a") is pool
        serve.listed = []
        await eventually(lambda: not started.router.pools.by_name)


async def test_a_question_that_fails_changes_nothing_and_is_told_once(lines: io.StringIO) -> None:
    async with discovering(FakePool("vision-a")) as (started, serve):
        await until_known(started, "vision-a")
        serve.unlisted = Failure(Code.UNAVAILABLE, "ListApplications is unavailable")
        asked = serve.listings
        await eventually(lambda: serve.listings >= asked + 5)
        await started.stub.EncodeImages(images(b"x"), timeout=10)
        serve.unlisted = None
        await eventually(lambda: "discovery_works" in lines.getvalue())
    told = [json.loads(line) for line in lines.getvalue().splitlines()]
    failed = [line for line in told if line["event"] == "discovery_failed"]
    assert [(line["level"], line["cause"]) for line in failed] == [("WARNING", "UNAVAILABLE")]


async def test_pools_of_the_settings_stay_and_come_first() -> None:
    fixed = FakePool("vision-z")
    async with PoolServer([fixed]) as own:
        target = {"name": "vision-z", "address": own.address}
        # Serve names one of the same name: that of the settings counts.
        async with discovering(FakePool("vision-a"), FakePool("vision-z"), extra=(target,)) as (started, serve):
            await until_known(started, "vision-z", "vision-a")
            assert list(started.router.pools.by_name) == ["vision-z", "vision-a"]
            assert started.state("vision-z").address == own.address
            serve.pools.clear()
            await until_known(started, "vision-z")
            await asyncio.sleep(0.3)
            await started.stub.EncodeImages(images(b"x"), timeout=10)


async def test_the_order_of_found_pools_is_that_of_their_names_on_every_router() -> None:
    async with discovering(FakePool("vision-m")) as (started, serve):
        await until_known(started, "vision-m")
        for name in ("vision-z", "vision-a"):
            serve.pools[name] = FakePool(name)
        await until_known(started, "vision-a", "vision-m", "vision-z")
        assert list(started.router.pools.by_name) == ["vision-a", "vision-m", "vision-z"]


async def test_what_is_no_pool_is_left_out_or_does_no_harm() -> None:
    dashboard, odd = FakePool("dashboard"), FakePool("Not A Pool")
    stranger = FakePool("stranger", unlisted=Failure(Code.UNIMPLEMENTED, "Method not found!"))
    async with discovering(FakePool("vision-a"), dashboard, odd, stranger, found={"ignore": ["dashboard"]}) as (
        started,
        _,
    ):
        await eventually(lambda: set(started.router.pools.by_name) == {"vision-a", "stranger"})
        await started.until_healthy("vision-a")
        assert await started.status() == SERVING
        await started.stub.EncodeImages(images(b"x"), timeout=10)
        assert not dashboard.seen
