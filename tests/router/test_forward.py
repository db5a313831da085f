"""Unary calls: where they go, what is passed on, what comes back."""

import asyncio

import grpc
import numpy as np
import pytest

from deployments import wire
from deployments.router import calls, failures
from deployments.router.pools import channel_options
from deployments.router.sections import ConnectionSettings
from encoder.v1 import encoder_pb2 as pb

from .fake_pool import FakePool, vector_of
from .harness import NOWHERE, eventually, failure_of, fleet, images, texts

Code = grpc.StatusCode


async def test_images_go_to_a_vision_pool_and_texts_to_a_text_pool() -> None:
    vision, text = FakePool("vision-cpu"), FakePool("text", tower="text")
    async with fleet(vision, text, own_address=False) as started:
        answer = await started.stub.EncodeImages(images(b"one", b"two"), timeout=10)
        assert [result.embedding.dimensions for result in answer.results] == [8, 8]
        np.testing.assert_array_equal(np.frombuffer(answer.results[1].embedding.values, "<f4"), vector_of(b"two"))
        assert answer.provenance.pool == "vision-cpu"
        answer = await started.stub.EncodeText(texts("a dog"), timeout=10)
        np.testing.assert_array_equal(np.frombuffer(answer.results[0].embedding.values, "<f4"), vector_of(b"a dog"))
        assert answer.results[0].token_count == 4
    assert [seen.method for seen in vision.requests] == ["EncodeImages"]
    assert [seen.method for seen in text.requests] == ["EncodeText"]


async def test_bytes_pass_through_unchanged_in_both_directions() -> None:
    # Options after the items and a field this version does not know: parsing and writing it again would change it.
    plain = images(b"x" * 1000).SerializeToString()
    options = pb.EncodeImagesRequest(options=pb.EncodeOptions(dimensions=4)).SerializeToString()
    unknown = b"\x7a\x03abc"
    request = plain + unknown + options
    pool = FakePool("vision-cpu")
    async with fleet(pool) as started:
        pool.answer = pb.EncodeImagesResponse(results=[pb.ImageResult()]).SerializeToString() + unknown
        send = started.channel.unary_unary("/encoder.v1.EncoderService/EncodeImages")
        assert await send(request, timeout=10) == pool.answer
    assert pool.requests[0].request == request


async def test_item_errors_stay_beside_their_neighbours() -> None:
    pool = FakePool("vision-cpu", bad_items={b"bad"})
    async with fleet(pool) as started:
        answer = await started.stub.EncodeImages(images(b"good", b"bad"), timeout=10)
    assert [result.WhichOneof("outcome") for result in answer.results] == ["embedding", "error"]
    assert answer.results[1].error.code == Code.INVALID_ARGUMENT.value[0]


@pytest.mark.parametrize("method", ["EncodeImages", "EncodeText"])
async def test_an_empty_batch_is_refused(method: str) -> None:
    vision, text = FakePool("vision-cpu"), FakePool("text", tower="text")
    async with fleet(vision, text) as started:
        request = images(model="clip") if method == "EncodeImages" else texts(model="clip")
        error = await failure_of(getattr(started.stub, method)(request, timeout=10))
    assert error.code() is Code.INVALID_ARGUMENT
    assert "send at least one" in error.details()
    assert not vision.requests
    assert not text.requests


async def test_a_request_that_is_no_message_is_refused_before_a_pool_is_asked() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool) as started:
        send = started.channel.unary_unary("/encoder.v1.EncoderService/EncodeImages")
        error = await failure_of(send(b"\x12\xff\x01short", timeout=10))
    assert error.code() is Code.INVALID_ARGUMENT
    assert not pool.requests


async def test_pinning_and_its_refusals() -> None:
    pools = [FakePool("vision-a", items_per_second=1000), FakePool("vision-b"), FakePool("text", tower="text")]
    async with fleet(*pools) as started:
        for _ in range(3):
            answer = await started.stub.EncodeImages(images(b"x", pool="vision-b"), timeout=10)
            assert answer.provenance.pool == "vision-b"

        error = await failure_of(started.stub.EncodeImages(images(b"x", pool="vision-c"), timeout=10))
        assert error.code() is Code.NOT_FOUND
        assert "'vision-c'" in error.details()
        assert all(pool.name in error.details() for pool in pools)

        error = await failure_of(started.stub.EncodeImages(images(b"x", pool="text"), timeout=10))
        assert error.code() is Code.FAILED_PRECONDITION
        assert "'text' serves texts, not images" in error.details()


async def test_models_and_their_refusals() -> None:
    pools = [FakePool("vision-a", model="clip"), FakePool("vision-b", model="siglip")]
    async with fleet(*pools) as started:
        for model, pool in (("siglip", "vision-b"), ("clip", "vision-a")):
            answer = await started.stub.EncodeImages(images(b"x", model=model), timeout=10)
            assert answer.provenance.pool == pool
        error = await failure_of(started.stub.EncodeImages(images(b"x", model="dino"), timeout=10))
        assert error.code() is Code.NOT_FOUND
        assert "clip, siglip" in error.details()
        # Without a name, the two models' vectors would be mixed.
        error = await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
        assert error.code() is Code.FAILED_PRECONDITION
        assert "clip, siglip" in error.details()
        error = await failure_of(started.stub.EncodeText(texts("x"), timeout=10))
        assert error.code() is Code.FAILED_PRECONDITION
        assert "no pool for texts is configured" in error.details()


async def test_the_default_model_serves_requests_that_name_none() -> None:
    pools = [FakePool("vision-a", model="clip"), FakePool("vision-b", model="siglip")]
    async with fleet(*pools, default_model="siglip") as started:
        for _ in range(3):
            answer = await started.stub.EncodeImages(images(b"x"), timeout=10)
            assert answer.provenance.pool == "vision-b"


async def test_no_healthy_pool_is_unavailable() -> None:
    target = {"name": "vision-gone", "address": NOWHERE, "towers": ["vision"]}
    async with fleet(FakePool("text", tower="text"), extra=[target]) as started:
        error = await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
    assert error.code() is Code.UNAVAILABLE
    assert "vision-gone" in error.details()
    assert NOWHERE not in error.details()


async def test_the_deadline_is_passed_on_with_a_margin() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool, deadline={"default_s": 7.0, "margin_s": 0.5}) as started:
        await started.stub.EncodeImages(images(b"x"), timeout=5)
        await started.stub.EncodeImages(images(b"x"))
    given, default = pool.requests
    assert given.time_remaining is not None
    assert 3.0 < given.time_remaining < 4.6
    assert 3000 < float(given.metadata[wire.DEADLINE_METADATA]) <= 4600
    assert default.time_remaining is not None
    assert 5.0 < default.time_remaining < 7.1


async def test_a_hung_pool_ends_in_deadline_exceeded_from_the_router() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool, deadline={"margin_s": 0.3}) as started:
        pool.released.clear()
        error = await failure_of(started.stub.EncodeImages(images(b"x"), timeout=1.0))
        assert error.code() is Code.DEADLINE_EXCEEDED
        assert "while pool 'vision-cpu' worked on it" in error.details()
        await eventually(lambda: pool.cancelled == 1)
        # The same when the client names no deadline.
    async with fleet(pool, deadline={"default_s": 0.3}) as started:
        error = await failure_of(started.stub.EncodeImages(images(b"x")))
    assert error.code() is Code.DEADLINE_EXCEEDED


async def test_cancellation_is_passed_on() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool) as started:
        pool.released.clear()
        call = started.stub.EncodeImages(images(b"x"))
        await eventually(lambda: pool.in_flight == 1)
        await eventually(lambda: started.state("vision-cpu").speed.in_flight == 1)
        call.cancel()
        await eventually(lambda: pool.in_flight == 0)
        assert pool.cancelled == 1
        await eventually(lambda: started.state("vision-cpu").speed.in_flight == 0)


async def test_metadata_is_passed_on_by_whitelist_and_the_request_id_comes_back() -> None:
    pool = FakePool("vision-cpu")
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    sent = (
        ("x-request-id", "mine-1"),
        ("traceparent", trace),
        ("tracestate", "a=b"),
        ("authorization", "Bearer secret"),
        ("application", "other-pool"),
        ("x-encoder-timeout-ms", "1"),
        ("x-anything", "else"),
    )
    async with fleet(pool) as started:
        call = started.stub.EncodeImages(images(b"x"), metadata=sent, timeout=10)
        await call
        assert dict(await call.trailing_metadata())["x-request-id"] == "mine-1"
    got = pool.requests[0].metadata
    timeout_ms = got.pop("x-encoder-timeout-ms")
    assert float(timeout_ms) > 1000
    got.pop("user-agent")
    assert got == {
        "application": "vision-cpu",
        "x-request-id": "mine-1",
        "request_id": "mine-1",
        "traceparent": trace,
        "tracestate": "a=b",
    }


@pytest.mark.parametrize("sent", [None, "", "has space", "x" * 129])
async def test_a_missing_or_unusable_request_id_is_replaced(sent: str | None) -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool) as started:
        metadata = (("x-request-id", sent),) if sent is not None else ()
        call = started.stub.EncodeImages(images(b"x"), metadata=metadata, timeout=10)
        await call
        made = dict(await call.trailing_metadata())["x-request-id"]
        error = await failure_of(started.stub.EncodeImages(images(), metadata=(("x-request-id", "r2"),), timeout=10))
    assert len(made) == 32
    assert made != sent
    assert pool.requests[0].metadata["x-request-id"] == made
    assert dict(error.trailing_metadata())["x-request-id"] == "r2"


async def test_too_large_a_request_is_refused_at_the_router() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool, max_message_bytes=100_000) as started:
        await started.stub.EncodeImages(images(b"x" * 99_000), timeout=10)
        error = await failure_of(started.stub.EncodeImages(images(b"x" * 101_000), timeout=10))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "larger than max" in error.details()
        # The same towards the client: an answer that is too large is no reason to ask again.
        pool.answer = b"\x0a\x00" * 60_000
        error = await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert error.details().startswith("a message is larger than pool 'vision-cpu' or the router takes")
    assert len(pool.requests) == 2


async def test_several_megabytes_pass() -> None:
    pool = FakePool("vision-cpu")
    content = bytes(range(256)) * 40_000
    async with fleet(pool) as started:
        answer = await started.stub.EncodeImages(images(content), timeout=30)
    np.testing.assert_array_equal(np.frombuffer(answer.results[0].embedding.values, "<f4"), vector_of(content))


async def test_pools_get_work_by_their_measured_speed_and_not_by_turns() -> None:
    # Far enough apart that a busy machine does not blur them.
    slow, fast = FakePool("vision-slow", forward_s=0.4), FakePool("vision-fast", forward_s=0.02)
    async with fleet(slow, fast) as started:

        async def client(requests: int) -> None:
            for _ in range(requests):
                await started.stub.EncodeImages(images(b"x"), timeout=30)

        # Little load: even the end of the fast one's queue comes before the slow one could be done.
        await asyncio.gather(*(client(20) for _ in range(3)))
        assert len(slow.requests) + len(fast.requests) == 60
        assert len(slow.requests) <= 6
        # Much load: twenty to one is what gets both done at the same time; turns would give each half.
        before = len(slow.requests)
        await asyncio.gather(*(client(1) for _ in range(105)))
        assert 2 <= len(slow.requests) - before <= 25


async def test_a_pool_that_hangs_is_not_taken_for_a_fast_one() -> None:
    hung, slow = FakePool("vision-hung", latency_s=0.002), FakePool("vision-slow", latency_s=0.4)
    async with fleet(hung, slow, health={"interval_s": 60.0}) as started:
        answer = await started.stub.EncodeImages(images(b"x"), timeout=30)
        assert answer.provenance.pool == "vision-hung"
        hung.released.clear()
        stuck = started.stub.EncodeImages(images(b"x"), timeout=30)
        await eventually(lambda: hung.in_flight == 1)
        await asyncio.sleep(0.6)  # more than the slow one needs
        for _ in range(3):
            answer = await started.stub.EncodeImages(images(b"x"), timeout=30)
            assert answer.provenance.pool == "vision-slow"
        hung.released.set()
        await stuck


def test_connections_to_pools() -> None:
    connection = ConnectionSettings(keepalive_s=7.0, keepalive_timeout_s=3.0, reconnect_max_s=1.5)
    options = dict(channel_options(5000, connection))
    assert options["grpc.max_send_message_length"] == options["grpc.max_receive_message_length"] == 5000
    assert options["grpc.max_reconnect_backoff_ms"] == 1500
    assert (options["grpc.keepalive_time_ms"], options["grpc.keepalive_timeout_ms"]) == (7000, 3000)


def test_the_names_shared_with_the_pools_are_theirs() -> None:
    assert calls.TIMEOUT_METADATA == wire.DEADLINE_METADATA
    assert failures.STATUS_DETAILS_METADATA == wire.STATUS_DETAILS_METADATA
