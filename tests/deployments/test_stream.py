"""EncodeStream over plain gRPC: ids, item errors, back-pressure, deadline, cancellation."""

import asyncio

import grpc
import numpy as np
import pytest

from deployments import wire
from encoder.v1 import encoder_pb2 as pb
from tests.deployments.formula import FormulaEngine, seed_of, vector_of
from tests.deployments.plain_server import serving
from tests.deployments.test_service import floats, unit, until

DEADLINE = wire.DEADLINE_METADATA


def item(name: str, source: bytes | None = None, **options: object) -> pb.EncodeStreamRequest:
    encoded = name.encode() if source is None else source
    return pb.EncodeStreamRequest(id=name, image=pb.Image(encoded=encoded), options=pb.EncodeOptions(**options))


async def answers(call) -> dict[str, pb.EncodeStreamResponse]:
    return {response.id: response async for response in call}


async def test_every_item_is_answered_under_its_id():
    names = [f"n{i}" for i in range(50)]
    async with serving(FormulaEngine(), max_stream_items=8) as (client, core):
        found = await answers(client.EncodeStream(iter([item(name) for name in names])))
        assert core._room.items == 0
    assert set(found) == set(names)
    for name in names:
        np.testing.assert_allclose(floats(found[name].embedding), unit(vector_of(seed_of(name.encode()))), rtol=1e-6)
        assert found[name].provenance.fingerprint == "f00d" and found[name].timings.batch_size >= 1


async def test_texts():
    requests = [pb.EncodeStreamRequest(id="t", text="a bb"), pb.EncodeStreamRequest(id="long", text="a " * 9)]
    async with serving(FormulaEngine("text")) as (client, _):
        found = await answers(client.EncodeStream(iter(requests)))
    np.testing.assert_allclose(floats(found["t"].embedding), unit(vector_of(3)), rtol=1e-6)
    assert (found["long"].token_count, found["long"].truncated) == (9, True)


async def test_what_concerns_one_item_ends_with_it():
    engine = FormulaEngine()
    requests = [
        item("bad", b"bad"),
        item("model", model="other"),
        item("pool", pool="other"),
        item("dimensions", dimensions=99),
        pb.EncodeStreamRequest(id="text", text="a"),
        pb.EncodeStreamRequest(id="nothing"),
        item("large", b"x" * 5000),
        item("good"),
    ]
    async with serving(engine, max_request_bytes=4096) as (client, _):
        found = await answers(client.EncodeStream(iter(requests)))
    codes = {name: response.error.code for name, response in found.items()}
    assert codes == {
        "bad": 3, "model": 5, "pool": 5, "dimensions": 3, "text": 9, "nothing": 3, "large": 3, "good": 0,
    }  # fmt: skip
    assert found["good"].HasField("embedding")
    assert engine.counters["item_errors"] == 7


async def test_no_more_is_read_than_is_under_way():
    engine = FormulaEngine()
    engine.gate.clear()
    read: list[int] = []

    async def endless():
        for i in range(10_000):
            read.append(i)
            yield item(str(i))

    async with serving(engine, max_stream_items=3) as (_, core):
        stream = core.encode_stream(endless())
        first = asyncio.ensure_future(anext(stream))
        await until(lambda: core._room.items == 3)
        await asyncio.sleep(0.05)
        assert len(read) == 3
        engine.gate.set()
        await first
        await asyncio.sleep(0.05)
        # The answer that was taken makes room for one more only when the next is asked for.
        assert len(read) == 3
        await anext(stream)
        await until(lambda: len(read) == 4)
        await stream.aclose()
        assert core._room.items == 0


async def test_a_stream_waits_for_room_instead_of_failing():
    engine = FormulaEngine()
    engine.gate.clear()
    async with serving(engine, max_waiting_items=2, max_items_per_request=2) as (client, core):
        unary = client.EncodeImages(pb.EncodeImagesRequest(images=[pb.Image(encoded=b"a"), pb.Image(encoded=b"b")]))
        await until(lambda: core._room.items == 2)
        streamed = asyncio.ensure_future(answers(client.EncodeStream(iter([item(str(i)) for i in range(5)]))))
        await until(lambda: len(core._room._waiters) == 5)
        engine.gate.set()
        found = await streamed
        await unary
    assert len(found) == 5 and all(response.HasField("embedding") for response in found.values())


async def test_the_deadline_ends_the_stream():
    engine = FormulaEngine()
    engine.gate.clear()
    async with serving(engine) as (client, core):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await answers(client.EncodeStream(iter([item("a")]), metadata=((DEADLINE, "50"),)))
        engine.gate.set()
        await until(lambda: core._room.items == 0)
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_the_deadline_ends_a_stream_that_sends_nothing():
    async def silence():
        await asyncio.sleep(30)
        yield item("never")

    async with serving(FormulaEngine()) as (client, _):
        with pytest.raises(grpc.aio.AioRpcError) as failed:
            await answers(client.EncodeStream(silence(), metadata=((DEADLINE, "50"),)))
    assert failed.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_a_cancelled_stream_leaves_nothing_behind():
    engine = FormulaEngine()
    engine.gate.clear()
    async with serving(engine) as (client, core):
        call = client.EncodeStream(iter([item(str(i)) for i in range(5)]))
        reading = asyncio.ensure_future(answers(call))
        await until(lambda: core._room.items == 5)
        call.cancel()
        await until(lambda: core._room.items == 0)
        with pytest.raises(asyncio.CancelledError):
            await reading
        engine.gate.set()
    assert sum(engine.batches) <= 1  # what was on the device already


async def test_items_after_close_are_unavailable():
    async with serving(FormulaEngine()) as (client, core):
        await core.close()
        found = await answers(client.EncodeStream(iter([item("a")])))
    assert found["a"].error.code == 14
