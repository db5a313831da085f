"""Age of connections, keepalive and pings, with times that do expire."""

import asyncio
import io
import json

import grpc

from encoder.v1 import encoder_pb2_grpc

from .fake_pool import FakePool, PoolServer
from .harness import eventually, failure_of, fleet, images
from .relay import Relay
from .test_stream import image_item

Code = grpc.StatusCode
# So that a test's channel has a connection of its own.
ALONE = ("grpc.use_local_subchannel_pool", 1)


def ports_of(lines: io.StringIO) -> list[str]:
    """Of the clients' connections, in the order in which they were used first."""
    logged = [json.loads(line) for line in lines.getvalue().splitlines()]
    return list(dict.fromkeys(line["peer"] for line in logged if line["event"] == "call"))


async def test_a_client_reconnects_when_its_connection_is_old_and_no_call_is_lost(lines: io.StringIO) -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool, connection={"max_age_s": 0.3, "max_age_grace_s": 30.0}) as started:

        async def old_enough() -> None:
            while len(ports_of(lines)) < 4:
                await started.stub.EncodeImages(images(b"x"), timeout=10)
                await asyncio.sleep(0.01)

        await asyncio.wait_for(old_enough(), 60)


async def test_by_default_a_connection_lasts(lines: io.StringIO) -> None:
    async with fleet(FakePool("vision-cpu")) as started:
        for _ in range(10):
            await started.stub.EncodeImages(images(b"x"), timeout=10)
            await asyncio.sleep(0.1)
    assert len(ports_of(lines)) == 1


async def test_what_is_under_way_on_an_old_connection_may_end_within_the_grace(lines: io.StringIO) -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool, connection={"max_age_s": 0.3, "max_age_grace_s": 30.0}) as started:
        stream = started.stub.EncodeStream(timeout=60)
        await stream.write(image_item("a", b"x"))
        assert (await stream.read()).id == "a"
        pool.released.clear()
        call = started.stub.EncodeImages(images(b"x"), timeout=60)
        await eventually(lambda: pool.in_flight == 1)
        # Long enough for the connection to be given up: others are used meanwhile.
        await asyncio.sleep(1.0)
        pool.released.set()
        assert (await call).results[0].HasField("embedding")
        await stream.write(image_item("b", b"x"))
        assert (await stream.read()).id == "b"
        await stream.done_writing()
        assert await stream.read() is grpc.aio.EOF
        await started.stub.EncodeImages(images(b"x"), timeout=10)
    assert len(ports_of(lines)) >= 2


async def test_what_outlasts_the_grace_is_cut_off() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool, connection={"max_age_s": 0.3, "max_age_grace_s": 0.3}) as started:
        pool.released.clear()
        error = await failure_of(started.stub.EncodeImages(images(b"x"), timeout=60))
        assert error.code() is Code.UNAVAILABLE
        await eventually(lambda: pool.in_flight == 0 and pool.cancelled == 1)
        pool.released.set()
        await started.stub.EncodeImages(images(b"x"), timeout=10)


QUICK_KEEPALIVE = {"keepalive_s": 0.3, "keepalive_timeout_s": 0.3}


async def test_a_client_that_has_vanished_is_noticed_and_its_calls_are_cancelled() -> None:
    pool = FakePool("vision-cpu")
    async with (
        fleet(pool, connection=QUICK_KEEPALIVE) as started,
        Relay(started.router.port) as relay,
        grpc.aio.insecure_channel(relay.address, options=(ALONE,)) as channel,
    ):
        stub = encoder_pb2_grpc.EncoderServiceStub(channel)
        await stub.EncodeImages(images(b"x"), timeout=10)
        pool.released.clear()
        call = stub.EncodeImages(images(b"x"), timeout=600)
        await eventually(lambda: pool.in_flight == 1)
        relay.silence()
        await eventually(lambda: pool.in_flight == 0)
        assert pool.cancelled == 1
        call.cancel()


async def test_a_client_that_is_only_quiet_is_left_alone() -> None:
    pool = FakePool("vision-cpu")
    async with (
        fleet(pool, connection=QUICK_KEEPALIVE) as started,
        Relay(started.router.port) as relay,
        grpc.aio.insecure_channel(relay.address, options=(ALONE,)) as channel,
    ):
        pool.released.clear()
        call = encoder_pb2_grpc.EncoderServiceStub(channel).EncodeImages(images(b"x"), timeout=60)
        await eventually(lambda: pool.in_flight == 1)
        await asyncio.sleep(2.0)
        pool.released.set()
        assert (await call).results[0].HasField("embedding")


async def test_a_pool_behind_a_lost_network_is_noticed_and_its_calls_go_to_another() -> None:
    lost, other = FakePool("vision-lost"), FakePool("vision-other", latency_s=0.05)
    async with PoolServer([lost]) as server, Relay(server.port) as relay:
        target = {"name": "vision-lost", "address": relay.address}
        # Probes do not come in between.
        health = {"interval_s": 600.0, "timeout_s": 600.0}
        async with fleet(other, extra=[target], connection=QUICK_KEEPALIVE, health=health) as started:
            await started.until_healthy("vision-lost")
            lost.released.clear()
            call = started.stub.EncodeImages(images(b"x"), timeout=60)
            await eventually(lambda: lost.in_flight == 1)
            relay.silence()
            assert (await call).provenance.pool == "vision-other"
            lost.released.set()


async def test_a_client_that_pings_too_often_is_disconnected() -> None:
    pool = FakePool("vision-cpu")
    # gRPC's own clients ping about once a second at most, and the third ping too many is one too many.
    options = (ALONE, ("grpc.keepalive_time_ms", 200), ("grpc.http2.max_pings_without_data", 0))
    for shortest_s, expected in ((10.0, Code.UNAVAILABLE), (0.1, Code.OK)):
        async with (
            fleet(pool, connection={"min_client_ping_s": shortest_s}) as started,
            grpc.aio.insecure_channel(f"127.0.0.1:{started.router.port}", options=options) as channel,
        ):
            pool.released.clear()
            call = encoder_pb2_grpc.EncoderServiceStub(channel).EncodeImages(images(b"x"), timeout=60)
            await eventually(lambda: pool.in_flight == 1)
            await asyncio.wait([asyncio.ensure_future(call.code())], timeout=30 if expected is Code.UNAVAILABLE else 5)
            pool.released.set()
            assert await call.code() is expected
