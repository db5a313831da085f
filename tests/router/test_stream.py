"""EncodeStream: items are answered under their ids, in any order, and fail alone."""

import asyncio
from collections.abc import AsyncIterator, Iterable

import grpc
import numpy as np

from encoder.v1 import encoder_pb2 as pb

from .fake_pool import Failure, FakePool, vector_of
from .harness import NOWHERE, Fleet, eventually, failure_of, fleet, numbers

Code = grpc.StatusCode


def image_item(name: str, content: bytes, **options: object) -> pb.EncodeStreamRequest:
    return pb.EncodeStreamRequest(id=name, image=pb.Image(encoded=content), options=pb.EncodeOptions(**options))


def text_item(name: str, text: str) -> pb.EncodeStreamRequest:
    return pb.EncodeStreamRequest(id=name, text=text)


async def answers(started: Fleet, items: Iterable[pb.EncodeStreamRequest]) -> dict[str, pb.EncodeStreamResponse]:
    """Sends all items, and returns the answers by id."""
    got = [answer async for answer in started.stub.EncodeStream(iter(items), timeout=30)]
    by_id = {answer.id: answer for answer in got}
    assert len(by_id) == len(got)
    return by_id


async def test_each_item_goes_to_its_tower_and_is_answered_under_its_id() -> None:
    vision, text = FakePool("vision-cpu"), FakePool("text", tower="text")
    async with fleet(vision, text) as started:
        items = [image_item(f"i{number}", b"%d" % number) for number in range(50)]
        items += [text_item(f"t{number}", f"text {number}") for number in range(50)]
        got = await answers(started, items)
    assert got.keys() == {item.id for item in items}
    for number in range(50):
        np.testing.assert_array_equal(numbers(got[f"i{number}"].embedding), vector_of(b"%d" % number))
        np.testing.assert_array_equal(numbers(got[f"t{number}"].embedding), vector_of(b"text %d" % number))
    assert got["i0"].provenance.pool == "vision-cpu"
    assert got["t0"].provenance.pool == "text"
    assert got["t0"].timings.forward_ms == 1.5
    assert (got["t0"].token_count, got["t0"].truncated) == (4, False)
    assert len(vision.requests) == len(text.requests) == 50


async def test_a_slow_item_does_not_hold_up_the_others() -> None:
    slow, fast = FakePool("slow"), FakePool("fast")
    async with fleet(slow, fast) as started:
        slow.released.clear()
        call = started.stub.EncodeStream(timeout=30)
        await call.write(image_item("first", b"1", pool="slow"))
        await call.write(image_item("second", b"2", pool="fast"))
        await call.done_writing()
        assert (await call.read()).id == "second"
        slow.released.set()
        assert (await call.read()).id == "first"
        assert await call.read() is grpc.aio.EOF
        assert await call.code() is Code.OK


async def test_items_fail_alone_with_the_right_codes() -> None:
    vision = FakePool("vision-cpu", bad_items={b"bad"})
    gone = {"name": "vision-gone", "address": NOWHERE, "towers": ["vision"]}
    async with fleet(vision, extra=[gone], retry={"attempts": 1}) as started:
        items = [
            image_item("good", b"x"),
            image_item("bad", b"bad"),
            pb.EncodeStreamRequest(id="nothing"),
            image_item("no-pool", b"x", pool="other"),
            image_item("no-model", b"x", model="dino"),
            image_item("down", b"x", pool="vision-gone"),
            text_item("no-tower", "a text"),
            image_item("also-good", b"y"),
        ]
        got = await answers(started, items)
    codes = {name: answer.error.code for name, answer in got.items() if answer.HasField("error")}
    assert codes == {
        "bad": Code.INVALID_ARGUMENT.value[0],
        "nothing": Code.INVALID_ARGUMENT.value[0],
        "no-pool": Code.NOT_FOUND.value[0],
        # The pool that is down may serve it.
        "no-model": Code.UNAVAILABLE.value[0],
        "down": Code.UNAVAILABLE.value[0],
        "no-tower": Code.FAILED_PRECONDITION.value[0],
    }
    assert got["good"].HasField("embedding")
    assert got["also-good"].HasField("embedding")
    assert "send an image or a text" in got["nothing"].error.message
    assert got["bad"].error.message == "not a picture"


async def test_a_failed_call_is_its_items_error_and_is_retried_before() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool) as started:
        pool.failures.append(Failure(Code.UNAVAILABLE, "draining"))
        pool.failures.append(Failure(Code.INTERNAL, "boom"))
        got = await answers(started, [image_item("a", b"x")])
        assert got["a"].error.code == Code.INTERNAL.value[0]
        assert got["a"].error.message == "pool 'vision-cpu' failed: boom"
    assert len(pool.requests) == 2


async def test_a_message_that_cannot_be_parsed_does_not_end_the_stream() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool) as started:
        call = started.channel.stream_stream("/encoder.v1.EncoderService/EncodeStream")(timeout=30)
        await call.write(b"\x1a\x7fshort")
        await call.write(image_item("good", b"x").SerializeToString())
        await call.done_writing()
        got = [pb.EncodeStreamResponse.FromString(answer) async for answer in call]
    by_id = {answer.id: answer for answer in got}
    assert by_id[""].error.code == Code.INVALID_ARGUMENT.value[0]
    assert by_id["good"].HasField("embedding")


async def test_an_answer_without_its_item_is_an_error_of_that_item() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool) as started:
        for answer in (b"", b"\xff\xff", pb.EncodeImagesResponse(results=[pb.ImageResult()] * 2).SerializeToString()):
            pool.answer = answer
            got = await answers(started, [image_item("a", b"x")])
            assert got["a"].error.code == Code.INTERNAL.value[0]


async def test_only_so_many_items_are_under_way_at_once() -> None:
    pool = FakePool("vision-cpu", latency_s=0.01)
    async with fleet(pool, stream={"max_in_flight": 5}) as started:
        pool.released.clear()
        collected = asyncio.create_task(answers(started, [image_item(str(n), b"x") for n in range(40)]))
        await eventually(lambda: pool.in_flight == 5)
        await asyncio.sleep(0.1)  # time in which more would have come
        assert pool.in_flight == 5
        pool.released.set()
        assert len(await collected) == 40
    assert pool.most_in_flight == 5


async def test_a_client_that_does_not_read_is_not_read_from() -> None:
    pool = FakePool("vision-cpu")
    written = 0

    async def items() -> AsyncIterator[pb.EncodeStreamRequest]:
        nonlocal written
        while True:
            written += 1
            yield image_item(str(written), b"x" * 10_000)

    async with fleet(pool, stream={"max_in_flight": 4}, health={"interval_s": 60.0}) as started:
        pool.vector = np.ones(200_000, np.float32)
        call = started.stub.EncodeStream(items(), timeout=60)
        await eventually(lambda: len(pool.requests) > 4)
        last = -1
        while last != len(pool.requests):  # until nothing more is taken
            last = len(pool.requests)
            assert last < 200
            await asyncio.sleep(0.5)
        # The client does not go on writing into nowhere either.
        assert written < 2000
        call.cancel()


async def test_cancelling_the_stream_cancels_what_is_under_way() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool) as started:
        pool.released.clear()
        call = started.stub.EncodeStream(timeout=30)
        for number in range(3):
            await call.write(image_item(str(number), b"x"))
        await eventually(lambda: pool.in_flight == 3)
        call.cancel()
        await eventually(lambda: pool.in_flight == 0)
        assert pool.cancelled == 3
        await eventually(lambda: started.state("vision-cpu").speed.in_flight == 0)


async def test_the_streams_deadline_ends_what_is_under_way() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool) as started:
        pool.released.clear()
        call = started.stub.EncodeStream(timeout=0.5)
        await call.write(image_item("a", b"x"))
        await eventually(lambda: pool.in_flight == 1)

        async def drain() -> None:
            async for _ in call:
                pass

        error = await failure_of(drain())
        assert error.code() is Code.DEADLINE_EXCEEDED
        await eventually(lambda: pool.in_flight == 0)


async def test_no_item_may_take_longer_than_its_stream() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool) as started:
        call = started.stub.EncodeStream(iter([image_item("a", b"x")]), timeout=5)
        assert len([answer async for answer in call]) == 1
    assert pool.requests[0].time_remaining is not None
    assert pool.requests[0].time_remaining < 5.1


async def test_an_item_has_a_deadline_of_its_own_in_a_stream_without_one() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool, deadline={"default_s": 0.2}) as started:
        call = started.stub.EncodeStream()
        await call.write(image_item("quick", b"x"))
        assert (await call.read()).HasField("embedding")
        pool.released.clear()
        await call.write(image_item("hung", b"x"))
        answer = await call.read()
        assert answer.id == "hung"
        assert answer.error.code == Code.DEADLINE_EXCEEDED.value[0]
        # The stream itself goes on.
        pool.released.set()
        await call.write(image_item("after", b"x"))
        assert (await call.read()).HasField("embedding")
        await call.done_writing()
        assert await call.read() is grpc.aio.EOF


async def test_the_request_id_is_told_at_once_and_at_the_end() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool) as started:
        call = started.stub.EncodeStream(metadata=(("x-request-id", "s1"),), timeout=30)
        assert dict(await call.initial_metadata())["x-request-id"] == "s1"
        await call.write(image_item("a", b"x"))
        await call.done_writing()
        assert [answer.id async for answer in call] == ["a"]
        assert dict(await call.trailing_metadata())["x-request-id"] == "s1"
    assert pool.requests[0].metadata["x-request-id"] == "s1"


async def test_an_empty_stream_ends_well() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool) as started:
        assert await answers(started, []) == {}
