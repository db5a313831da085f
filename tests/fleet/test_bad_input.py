"""Bad input of every kind through a whole fleet: each call ends with its own status, and the fleet serves on.

Each call has `PATIENCE_S`; one that hangs ends as DEADLINE_EXCEEDED, which only a dead deadline may.
"""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from encoder.v1 import encoder_pb2 as pb
from tests.fleet.conftest import CPU, NPU, POOL_BYTES, TEXT
from tests.fleet.gateway import gateway
from tests.fleet.load import ATOL, TEXTS, Oracle, pictures
from tests.fleet.machine import Machine
from tests.router.harness import Fleet, eventually, failure_of, images, numbers, scrape, texts
from tests.router.test_stream import image_item, text_item
from tests.router.test_tokens import ALICE, BOB, bearer, entry, write

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1800)]
Code = grpc.StatusCode
PATIENCE_S = 30.0
ROUTER_BYTES = 2 * POOL_BYTES
GOOD = pictures()
JPEG_CUT = GOOD[0][: len(GOOD[0]) // 2]
# A PNG header of 60,000 x 60,000 pixels.
BOMB = b"\x89PNG\r\n\x1a\n\x00\x00\x00\rIHDR\x00\x00\xea\x60\x00\x00\xea\x60\x08\x02\x00\x00\x00"
UNARY = "/encoder.v1.EncoderService/"
# Calls by name: method, request (bytes go as they are), what they end with.
Bad = tuple[str, Any, Code]
BAD_CALLS: dict[str, Bad] = {
    "empty": ("EncodeImages", pb.EncodeImagesRequest(), Code.INVALID_ARGUMENT),
    "empty text": ("EncodeText", b"", Code.INVALID_ARGUMENT),
    "no message": ("EncodeImages", b"\xff\xfe no protobuf", Code.INVALID_ARGUMENT),
    "no image message": ("EncodeImages", b"\x12\x03\xff\xff\xff", Code.INVALID_ARGUMENT),
    "no UTF-8": ("EncodeText", b"\x12\x02\xff\xfe", Code.INVALID_ARGUMENT),
    "unknown model": ("EncodeImages", images(GOOD[0], model="other"), Code.NOT_FOUND),
    "unknown pool": ("EncodeImages", images(GOOD[0], pool="elsewhere"), Code.NOT_FOUND),
    "pool of the other tower": ("EncodeText", texts("a", pool=CPU), Code.FAILED_PRECONDITION),
    "too many dimensions": ("EncodeImages", images(GOOD[0], dimensions=65), Code.INVALID_ARGUMENT),
    "unknown dtype": ("EncodeImages", images(GOOD[0], dtype=99), Code.INVALID_ARGUMENT),
    "unknown output": ("EncodeImages", images(GOOD[0], output=99), Code.INVALID_ARGUMENT),
    "unknown overflow": ("EncodeText", texts("a", text_overflow=99), Code.INVALID_ARGUMENT),
    "features in int8": ("EncodeImages", images(GOOD[0], output=2, dtype=3), Code.INVALID_ARGUMENT),
    "too many items": ("EncodeImages", images(*[b""] * 513), Code.INVALID_ARGUMENT),
    "oversize for the pool": ("EncodeImages", images(bytes(POOL_BYTES + 1000)), Code.INVALID_ARGUMENT),
    "oversize for the router": ("EncodeImages", images(bytes(ROUTER_BYTES + 1000)), Code.RESOURCE_EXHAUSTED),
    "unknown method": ("EncodeSounds", b"", Code.UNIMPLEMENTED),
}
# Pictures that are none, each between good ones.
BAD_PICTURES = {
    "nothing": pb.Image(),
    "no bytes": pb.Image(encoded=b""),
    "text": pb.Image(encoded=b"not a picture"),
    "cut off": pb.Image(encoded=JPEG_CUT),
    "bomb": pb.Image(encoded=BOMB),
    "too few pixels": pb.Image(pixels=pb.RawPixels(data=b"123", height=64, width=64, channels=3)),
    "two channels": pb.Image(pixels=pb.RawPixels(data=bytes(2 * 64 * 64), height=64, width=64, channels=2)),
    "no height": pb.Image(pixels=pb.RawPixels(data=b"", height=0, width=64, channels=3)),
}


async def assert_serves(router: Fleet, oracle: Oracle) -> None:
    """Good pictures at both vision pools and good texts bring the right vectors."""
    mine: dict[str, Any] = {"metadata": bearer(ALICE), "timeout": PATIENCE_S}
    for name in (NPU, CPU):
        answer = await router.stub.EncodeImages(images(*GOOD, pool=name), **mine)
        assert answer.provenance.pool == name
        np.testing.assert_allclose([numbers(one.embedding) for one in answer.results], oracle.images, atol=ATOL)
    answer = await router.stub.EncodeText(texts(*TEXTS), **mine)
    assert answer.provenance.pool == TEXT
    np.testing.assert_allclose([numbers(one.embedding) for one in answer.results], oracle.texts, atol=ATOL)


async def test_every_bad_input_has_its_own_status(whole_fleet: Machine, oracle: Oracle, tmp_path: Path) -> None:
    tokens = {"file": write(tmp_path / "tokens.yaml", entry("alice", ALICE))}
    before = whole_fleet.replicas(NPU) | whole_fleet.replicas(CPU) | whole_fleet.replicas(TEXT)
    async with gateway(whole_fleet, tokens=tokens, max_message_bytes=ROUTER_BYTES) as router:
        await bad_calls(router)
        await assert_serves(router, oracle)
        await bad_callers(router)
        await assert_serves(router, oracle)
        await bad_items(router, oracle)
        await bad_streams(router, oracle)
        await assert_serves(router, oracle)
    # Nothing of it cost a replica.
    after = whole_fleet.replicas(NPU) | whole_fleet.replicas(CPU) | whole_fleet.replicas(TEXT)
    assert after == before


async def bad_calls(router: Fleet) -> None:
    found, lines = {}, {}
    for name, (method, request, _) in BAD_CALLS.items():
        payload = request if isinstance(request, bytes) else request.SerializeToString()
        call = router.channel.unary_unary(UNARY + method)(payload, metadata=bearer(ALICE), timeout=PATIENCE_S)
        error = await failure_of(call)
        found[name], lines[name] = error.code(), error.details()
    assert found == {name: code for name, (_, _, code) in BAD_CALLS.items()}
    for name, line in lines.items():
        assert line and "\n" not in line and "Traceback" not in line and "127.0.0.1" not in line, (name, line)


async def bad_callers(router: Fleet) -> None:
    """Without a token, with a wrong one, with no time, and one that goes away."""
    encode = router.stub.EncodeImages
    metadata: Any
    for metadata in ((), bearer(BOB), (("authorization", "Basic eDp5"),), (("authorization", ""),)):
        error = await failure_of(encode(images(*GOOD), metadata=metadata, timeout=PATIENCE_S))
        assert error.code() is Code.UNAUTHENTICATED, metadata
        stream = router.stub.EncodeStream(iter([image_item("a", GOOD[0])]), metadata=metadata, timeout=PATIENCE_S)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            [answer async for answer in stream]
        assert refused.value.code() is Code.UNAUTHENTICATED, metadata
    for seconds in (1e-6, 1e-3):
        error = await failure_of(encode(images(*GOOD * 4), metadata=bearer(ALICE), timeout=seconds))
        assert error.code() is Code.DEADLINE_EXCEEDED
    calls = [encode(images(*GOOD * 4), metadata=bearer(ALICE), timeout=PATIENCE_S) for _ in range(10)]
    for number, call in enumerate(calls):
        await asyncio.sleep(0.003 * number)
        call.cancel()
        # A quick fleet has answered before.
        assert await call.code() in (Code.CANCELLED, Code.OK)
    await until_idle(router)


async def bad_items(router: Fleet, oracle: Oracle) -> None:
    """In one batch, at each pool: what is bad is told by its own status, and its neighbours have their vectors."""
    batch = [item for bad in BAD_PICTURES.values() for item in (pb.Image(encoded=GOOD[0]), bad)]
    for name in (NPU, CPU):
        request = pb.EncodeImagesRequest(images=batch, options=pb.EncodeOptions(pool=name))
        answer = await router.stub.EncodeImages(request, metadata=bearer(ALICE), timeout=PATIENCE_S)
        for good in answer.results[::2]:
            np.testing.assert_allclose(numbers(good.embedding), oracle.images[0], atol=ATOL)
        codes = {bad: result.error.code for bad, result in zip(BAD_PICTURES, answer.results[1::2], strict=True)}
        assert codes == dict.fromkeys(BAD_PICTURES, Code.INVALID_ARGUMENT.value[0])
    long = texts("a", "red circle " * 500, text_overflow=2)
    short, refused = (await router.stub.EncodeText(long, metadata=bearer(ALICE), timeout=PATIENCE_S)).results
    assert short.HasField("embedding") and refused.error.code == Code.INVALID_ARGUMENT.value[0]


async def bad_streams(router: Fleet, oracle: Oracle) -> None:
    mine: dict[str, Any] = {"metadata": bearer(ALICE), "timeout": PATIENCE_S}
    # Closed by the client before it has sent anything.
    silent = router.stub.EncodeStream(**mine)
    await silent.done_writing()
    assert await silent.read() is grpc.aio.EOF and await silent.code() is Code.OK
    # Closed by the client right after its items: all are answered.
    items = [image_item(f"i{n}", GOOD[n % len(GOOD)]) for n in range(20)] + [text_item("t", TEXTS[0])]
    items += [
        pb.EncodeStreamRequest(id="nothing"),
        image_item("broken", b"junk"),
        image_item("no model", GOOD[0], model="other"),
        image_item("no pool", GOOD[0], pool="elsewhere"),
    ]
    found = {answer.id: answer async for answer in router.stub.EncodeStream(iter(items), **mine)}
    assert found.keys() == {item.id for item in items}
    for n in range(20):
        np.testing.assert_allclose(numbers(found[f"i{n}"].embedding), oracle.images[n % len(GOOD)], atol=ATOL)
    np.testing.assert_allclose(numbers(found["t"].embedding), oracle.texts[0], atol=ATOL)
    codes = {name: answer.error.code for name, answer in found.items() if answer.HasField("error")}
    assert codes == {"nothing": 3, "broken": 3, "no model": 5, "no pool": 5}
    # Left open by the client, which has its answer and never says that it is done.
    left_open = router.stub.EncodeStream(metadata=bearer(ALICE), timeout=5.0)
    await left_open.write(image_item("a", GOOD[0]))
    assert (await left_open.read()).id == "a"
    with pytest.raises(grpc.aio.AioRpcError) as late:
        await left_open.read()
    assert late.value.code() is Code.DEADLINE_EXCEEDED
    # Left by the client with items under way.
    left = router.stub.EncodeStream(**mine)
    for n in range(30):
        await left.write(image_item(f"i{n}", GOOD[0]))
    left.cancel()
    assert await left.code() is Code.CANCELLED
    await until_idle(router)


async def until_idle(router: Fleet) -> None:
    """Nothing that the router was asked is under way any more, at the pools either."""
    await eventually(lambda: all(router.state(name).speed.in_flight == 0 for name in (NPU, CPU, TEXT)), PATIENCE_S)
    async with asyncio.timeout(PATIENCE_S):
        while any(await calls_in_flight(router)):  # noqa: ASYNC110 - metrics are asked, no event can tell
            await asyncio.sleep(0.1)


async def calls_in_flight(router: Fleet) -> list[float]:
    return [value for name, value in (await scrape(router)).items() if name.startswith("calls_in_flight{")]
