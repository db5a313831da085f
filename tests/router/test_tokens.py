"""Bearer tokens over real sockets: who gets in, how much, and what is told of it."""

import asyncio
import hashlib
import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from grpc_status import rpc_status

from encoder.client import AsyncEncoderClient
from encoder.v1 import encoder_pb2 as pb

from .fake_pool import FakePool
from .harness import Fleet, eventually, failure_of, fleet, images, scrape, texts
from .test_stream import image_item

Code = grpc.StatusCode
ALICE, BOB = "vf_alices-token", "vf_bobs-token"


def entry(name: str, token: str, **limits: Any) -> dict[str, Any]:
    wide = {"requests_per_second": 1000, "burst": 1000, "max_in_flight": 100}
    return {"name": name, "sha256": hashlib.sha256(token.encode()).hexdigest(), **wide, **limits}


def bearer(token: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {token}"),)


def write(path: Path, *entries: dict[str, Any]) -> Path:
    return replace(path, yaml.safe_dump(list(entries)).encode())


def replace(path: Path, content: bytes) -> Path:
    """Puts the new file into the place of the old one, as careful writers do: nobody sees half of it."""
    new = path.with_suffix(".new")
    new.write_bytes(content)
    return new.replace(path)


@asynccontextmanager
async def guarded(
    file: Path, *pools: FakePool, tokens: dict[str, Any] | None = None, **overrides: Any
) -> AsyncIterator[Fleet]:
    settings = {"file": file, "reload_s": 0.05, **(tokens or {})}
    async with fleet(*(pools or (FakePool("vision-cpu"),)), tokens=settings, **overrides) as started:
        yield started


def retry_delay_s(error: grpc.aio.AioRpcError) -> float:
    status = rpc_status.from_call(error)
    assert status is not None
    info = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    return info.retry_delay.ToMilliseconds() / 1e3


@pytest.mark.parametrize(
    "metadata",
    [
        (),
        (("authorization", ""),),
        (("authorization", "Bearer"),),
        (("authorization", "Bearer  "),),
        (("authorization", ALICE),),
        (("authorization", f"Basic {ALICE}"),),
        bearer(ALICE + "x"),
        bearer(ALICE[:-1]),
        bearer(hashlib.sha256(ALICE.encode()).hexdigest()),
        bearer("x" * 5000),
        (("x-api-key", ALICE),),
    ],
    ids=str,
)
async def test_without_a_known_token_nothing_is_served(tmp_path: Path, metadata: tuple[tuple[str, str], ...]) -> None:
    vision, text = FakePool("vision-cpu"), FakePool("text", tower="text")
    async with guarded(write(tmp_path / "tokens.yaml", entry("alice", ALICE)), vision, text) as started:
        stub = started.stub
        for call in (
            stub.EncodeImages(images(b"x"), metadata=metadata, timeout=10),
            stub.EncodeText(texts("x"), metadata=metadata, timeout=10),
            stub.ListModels(pb.ListModelsRequest(), metadata=metadata, timeout=10),
            stub.GetModel(pb.GetModelRequest(), metadata=metadata, timeout=10),
            stub.GetBackendReport(pb.GetBackendReportRequest(), metadata=metadata, timeout=10),
            stub.EncodeStream(iter([image_item("a", b"x")]), metadata=metadata, timeout=10).read(),
            started.channel.unary_unary("/other.Service/Method")(b"", metadata=metadata, timeout=10),
        ):
            error = await failure_of(call)
            assert error.code() is Code.UNAUTHENTICATED
            assert "authorization: Bearer" in error.details()
            assert ALICE not in error.details()
        assert not vision.requests
        assert not text.requests


@pytest.mark.parametrize("scheme", ["Bearer", "bearer", "BEARER"])
async def test_a_known_token_opens_everything(tmp_path: Path, scheme: str) -> None:
    metadata = (("authorization", f"{scheme} {ALICE}"),)
    file = write(tmp_path / "tokens.yaml", entry("bob", BOB), entry("alice", ALICE))
    pool = FakePool("vision-cpu")
    async with guarded(file, pool) as started:
        await started.stub.EncodeImages(images(b"x"), metadata=metadata, timeout=10)
        await started.stub.ListModels(pb.ListModelsRequest(), metadata=metadata, timeout=10)
        call = started.stub.EncodeStream(iter([image_item("a", b"x")]), metadata=metadata, timeout=10)
        assert (await call.read()).HasField("embedding")
    assert all("authorization" not in seen.metadata for seen in pool.seen)


async def test_the_projects_own_client_gets_in(tmp_path: Path) -> None:
    file = write(tmp_path / "tokens.yaml", entry("alice", ALICE))
    async with (
        guarded(file) as started,
        AsyncEncoderClient(f"127.0.0.1:{started.router.port}", token=ALICE) as client,
    ):
        assert (await client.encode_images([b"x"])).shape == (1, 8)


async def test_health_needs_no_token(tmp_path: Path) -> None:
    async with guarded(write(tmp_path / "tokens.yaml", entry("alice", ALICE))) as started:
        assert await started.status() == health_pb2.HealthCheckResponse.SERVING
        watch = started.health.Watch(health_pb2.HealthCheckRequest())
        assert (await watch.read()).status == health_pb2.HealthCheckResponse.SERVING
        watch.cancel()


@pytest.mark.parametrize("exempt", [False, True])
async def test_reflection_needs_a_token_unless_it_is_exempt(tmp_path: Path, exempt: bool) -> None:
    file = write(tmp_path / "tokens.yaml", entry("alice", ALICE))
    request = reflection_pb2.ServerReflectionRequest(list_services="")
    async with guarded(file, tokens={"reflection_exempt": exempt}) as started:
        stub = reflection_pb2_grpc.ServerReflectionStub(started.channel)
        with_token = stub.ServerReflectionInfo(iter([request]), metadata=bearer(ALICE), timeout=10)
        assert (await with_token.read()).HasField("list_services_response")
        without = stub.ServerReflectionInfo(iter([request]), timeout=10)
        if exempt:
            assert (await without.read()).HasField("list_services_response")
        else:
            assert (await failure_of(without.read())).code() is Code.UNAUTHENTICATED


async def test_an_unknown_caller_cannot_make_the_router_read_a_large_request(tmp_path: Path) -> None:
    file = write(tmp_path / "tokens.yaml", entry("alice", ALICE))
    async with guarded(file, max_message_bytes=100_000) as started:
        big = images(b"x" * 1_000_000)
        error = await failure_of(started.stub.EncodeImages(big, timeout=10))
        # Had the message been read, its size would have been what is wrong with it.
        assert error.code() is Code.UNAUTHENTICATED
        error = await failure_of(started.stub.EncodeImages(big, metadata=bearer(ALICE), timeout=10))
        assert error.code() is Code.RESOURCE_EXHAUSTED


async def test_more_calls_than_allowed_are_refused_with_the_time_to_wait(tmp_path: Path) -> None:
    slow = {"requests_per_second": 0.5, "burst": 3}
    file = write(tmp_path / "tokens.yaml", entry("alice", ALICE, **slow), entry("bob", BOB))
    async with guarded(file, metrics_port=0) as started:
        for _ in range(3):
            await started.stub.EncodeImages(images(b"x"), metadata=bearer(ALICE), timeout=10)
        error = await failure_of(started.stub.EncodeImages(images(b"x"), metadata=bearer(ALICE), timeout=10))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "'alice'" in error.details()
        assert "0.5 calls a second" in error.details()
        assert 1.0 < retry_delay_s(error) <= 2.0
        # All methods count, streams too.
        error = await failure_of(started.stub.ListModels(pb.ListModelsRequest(), metadata=bearer(ALICE), timeout=10))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        stream = started.stub.EncodeStream(iter([]), metadata=bearer(ALICE), timeout=10)
        assert (await failure_of(stream.read())).code() is Code.RESOURCE_EXHAUSTED
        # Nobody else is held up.
        for _ in range(10):
            await started.stub.EncodeImages(images(b"x"), metadata=bearer(BOB), timeout=10)
        await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
        await failure_of(started.stub.EncodeImages(images(b"x"), metadata=bearer("other"), timeout=10))
        metrics = await scrape(started)
    assert metrics['token_refusals_total{reason="rate",token="alice"}'] == 3.0
    assert metrics['token_refusals_total{reason="missing",token=""}'] == 1.0
    assert metrics['token_refusals_total{reason="unknown",token=""}'] == 1.0
    assert metrics['token_calls_total{code="OK",token="bob"}'] == 10.0
    assert metrics['token_calls_total{code="RESOURCE_EXHAUSTED",token="alice"}'] == 3.0
    assert metrics['calls_total{code="UNAUTHENTICATED",method="EncodeImages",pool=""}'] == 2.0


async def test_more_calls_under_way_than_allowed_are_refused(tmp_path: Path) -> None:
    file = write(tmp_path / "tokens.yaml", entry("alice", ALICE, max_in_flight=2), entry("bob", BOB))
    pool = FakePool("vision-cpu")
    async with guarded(file, pool) as started:
        pool.released.clear()
        calls = [started.stub.EncodeImages(images(b"x"), metadata=bearer(ALICE), timeout=30) for _ in range(2)]
        await eventually(lambda: pool.in_flight == 2)
        error = await failure_of(started.stub.EncodeImages(images(b"x"), metadata=bearer(ALICE), timeout=10))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "2 calls under way" in error.details()
        assert retry_delay_s(error) > 0
        other = started.stub.EncodeImages(images(b"x"), metadata=bearer(BOB), timeout=30)
        await eventually(lambda: pool.in_flight == 3)
        # One that is cancelled makes room, as do those that end.
        calls[0].cancel()
        await eventually(lambda: pool.in_flight == 2)
        calls.append(started.stub.EncodeImages(images(b"x"), metadata=bearer(ALICE), timeout=30))
        await eventually(lambda: pool.in_flight == 3)
        pool.released.set()
        for call in (*calls[1:], other):
            await call
        for _ in range(3):
            await started.stub.EncodeImages(images(b"x"), metadata=bearer(ALICE), timeout=10)


async def test_items_are_counted_and_a_large_batch_is_paid_off_before_the_next(tmp_path: Path) -> None:
    file = write(tmp_path / "tokens.yaml", entry("alice", ALICE, max_items_per_second=20.0))
    async with guarded(file) as started:
        # A second's worth is there: the batch is larger, and passes all the same.
        await started.stub.EncodeImages(images(*[b"x"] * 60), metadata=bearer(ALICE), timeout=10)
        error = await failure_of(started.stub.EncodeImages(images(b"x"), metadata=bearer(ALICE), timeout=10))
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "20 items a second" in error.details()
        # 40 items over, and one to send, at 20 a second.
        assert 1.0 < retry_delay_s(error) <= 2.05
        # What has no items is not held up by them.
        await started.stub.ListModels(pb.ListModelsRequest(), metadata=bearer(ALICE), timeout=10)


async def test_items_of_a_stream_wait_for_their_turn_and_none_is_refused(tmp_path: Path) -> None:
    limits = {"max_in_flight": 2, "requests_per_second": 50, "burst": 5}
    file = write(tmp_path / "tokens.yaml", entry("alice", ALICE, **limits))
    pool = FakePool("vision-cpu", latency_s=0.02)
    async with guarded(file, pool) as started:
        loop = asyncio.get_running_loop()
        began = loop.time()
        items = [image_item(str(number), b"x") for number in range(30)]
        call = started.stub.EncodeStream(iter(items), metadata=bearer(ALICE), timeout=30)
        answers = [answer async for answer in call]
        took_s = loop.time() - began
    assert {answer.id for answer in answers} == {item.id for item in items}
    assert all(answer.HasField("embedding") for answer in answers)
    assert pool.most_in_flight <= 2
    # 1 call to open and 30 items, of which 5 were saved up, at 50 a second.
    assert took_s >= 26 / 50


async def test_streams_are_bounded_as_calls_are(tmp_path: Path) -> None:
    file = write(tmp_path / "tokens.yaml", entry("alice", ALICE, max_in_flight=1))
    async with guarded(file) as started:
        first = started.stub.EncodeStream(metadata=bearer(ALICE), timeout=30)
        await first.write(image_item("a", b"x"))
        assert (await first.read()).HasField("embedding")
        second = started.stub.EncodeStream(iter([]), metadata=bearer(ALICE), timeout=10)
        error = await failure_of(second.read())
        assert error.code() is Code.RESOURCE_EXHAUSTED
        assert "1 streams under way" in error.details()
        # An open stream that sends nothing takes no room from calls.
        await started.stub.EncodeImages(images(b"x"), metadata=bearer(ALICE), timeout=10)
        await first.done_writing()
        assert await first.read() is grpc.aio.EOF
        third = started.stub.EncodeStream(iter([]), metadata=bearer(ALICE), timeout=10)
        assert await third.read() is grpc.aio.EOF
        assert await third.code() is Code.OK


async def served(started: Fleet, token: str) -> bool:
    try:
        await started.stub.EncodeImages(images(b"x"), metadata=bearer(token), timeout=10)
    except grpc.aio.AioRpcError as error:
        assert error.code() is Code.UNAUTHENTICATED
        return False
    return True


async def until_served(started: Fleet, token: str, expected: bool) -> None:
    for _ in range(1000):
        if await served(started, token) is expected:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("the changed file was never taken over")


async def test_a_changed_file_holds_without_a_restart(tmp_path: Path) -> None:
    file = write(tmp_path / "tokens.yaml", entry("alice", ALICE))
    async with guarded(file) as started:
        assert await served(started, ALICE)
        assert not await served(started, BOB)
        write(file, entry("bob", BOB))
        await until_served(started, BOB, True)
        assert not await served(started, ALICE)
        # Written in place.
        file.write_text(yaml.safe_dump([entry("alice", ALICE), entry("bob", BOB)]))
        await until_served(started, ALICE, True)
        write(file)
        await until_served(started, ALICE, False)
        assert not await served(started, BOB)


@pytest.mark.parametrize(
    "broken",
    [
        "- name: [",
        "tokens: {}",
        "",
        json.dumps([{"name": "eve", "sha256": "abc"}]),
        json.dumps([entry("eve", "e") | {"token": "vf_secret"}]),
        json.dumps([entry("eve", "e"), entry("eve", "f")]),
        "\udc80",
        None,
    ],
    ids=["no YAML", "no list", "empty", "no hash", "unknown key", "names twice", "no text", "gone"],
)
async def test_a_broken_new_file_keeps_the_old_one_and_says_so(
    tmp_path: Path, broken: str | None, lines: io.StringIO
) -> None:
    file = write(tmp_path / "tokens.yaml", entry("alice", ALICE))
    async with guarded(file, metrics_port=0) as started:
        if broken is None:
            file.unlink()
        else:
            replace(file, broken.encode("utf-8", "surrogateescape"))
        await eventually(lambda: "tokens_refused" in lines.getvalue())
        assert await served(started, ALICE)
        assert not await served(started, "e")
        write(file, entry("bob", BOB))
        await until_served(started, BOB, True)
        metrics = await scrape(started)
    told = [json.loads(line) for line in lines.getvalue().splitlines()]
    refused = [line for line in told if line["event"] == "tokens_refused"]
    assert len(refused) == 1
    assert (refused[0]["level"], refused[0]["kept"]) == ("ERROR", "the former ones")
    assert str(file) in refused[0]["reason"]
    assert "vf_secret" not in lines.getvalue()
    assert metrics['reloads_total{file="tokens",outcome="refused"}'] == 1.0
    assert metrics['reloads_total{file="tokens",outcome="loaded"}'] == 1.0


async def test_what_was_spent_and_what_is_under_way_outlasts_a_change_of_the_file(tmp_path: Path) -> None:
    limits = {"requests_per_second": 0.01, "burst": 5, "max_in_flight": 2}
    file = write(tmp_path / "tokens.yaml", entry("alice", ALICE, **limits))
    pool = FakePool("vision-cpu")
    async with guarded(file, pool) as started:
        pool.released.clear()
        calls = [started.stub.EncodeImages(images(b"x"), metadata=bearer(ALICE), timeout=30) for _ in range(2)]
        await eventually(lambda: pool.in_flight == 2)
        write(file, entry("alice", ALICE, **limits), entry("bob", BOB))
        await until_served_by_model_list(started, BOB)
        error = await failure_of(started.stub.EncodeImages(images(b"x"), metadata=bearer(ALICE), timeout=10))
        assert "under way" in error.details()
        pool.released.set()
        for call in calls:
            await call
        # Of five calls at once two are spent, not none.
        for _ in range(3):
            await started.stub.EncodeImages(images(b"x"), metadata=bearer(ALICE), timeout=10)
        error = await failure_of(started.stub.EncodeImages(images(b"x"), metadata=bearer(ALICE), timeout=10))
        assert "calls a second" in error.details()


async def until_served_by_model_list(started: Fleet, token: str) -> None:
    for _ in range(1000):
        try:
            await started.stub.ListModels(pb.ListModelsRequest(), metadata=bearer(token), timeout=10)
            return
        except grpc.aio.AioRpcError:
            await asyncio.sleep(0.01)
    raise AssertionError("the changed file was never taken over")


async def test_logs_name_the_owner_and_never_a_token(tmp_path: Path, lines: io.StringIO) -> None:
    file = write(tmp_path / "tokens.yaml", entry("alice", ALICE))
    async with guarded(file) as started:
        await started.stub.EncodeImages(images(b"x"), metadata=bearer(ALICE), timeout=10)
        await failure_of(started.stub.EncodeImages(images(b"x"), metadata=bearer(BOB), timeout=10))
        await failure_of(started.stub.EncodeImages(images(b"x"), metadata=(("authorization", BOB),), timeout=10))
        await failure_of(started.channel.unary_unary("/x.Y/Z")(b"", metadata=bearer(BOB), timeout=10))
    told = [json.loads(line) for line in lines.getvalue().splitlines()]
    calls = [(line["method"], line["code"], line["token"]) for line in told if line["event"] == "call"]
    assert calls == [
        ("EncodeImages", "OK", "alice"),
        ("EncodeImages", "UNAUTHENTICATED", ""),
        ("EncodeImages", "UNAUTHENTICATED", ""),
        ("other", "UNAUTHENTICATED", ""),
    ]
    for secret in (ALICE, BOB, hashlib.sha256(ALICE.encode()).hexdigest()):
        assert secret not in lines.getvalue()


@pytest.mark.parametrize(("host", "tls", "warned"), [("127.0.0.1", False, False), ("0.0.0.0", False, True)])
async def test_tokens_without_encryption_are_warned_of_beyond_this_machine(
    tmp_path: Path, lines: io.StringIO, host: str, tls: bool, warned: bool
) -> None:
    file = write(tmp_path / "tokens.yaml", entry("alice", ALICE))
    async with guarded(file, host=host):
        assert ("tokens_in_plain_text" in lines.getvalue()) is warned
