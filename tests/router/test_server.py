"""The server around the service: drain, reflection, metrics, logs, ports."""

import asyncio
import io
import json

import grpc
import pytest
from google.protobuf import descriptor_pb2
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc

from deployments.router.server import Router, server_options
from encoder.errors import InvalidInput
from encoder.v1 import encoder_pb2 as pb

from .fake_pool import Failure, FakePool
from .harness import NOWHERE, eventually, failure_of, fleet, images, scrape, settings_for, texts
from .test_stream import image_item

Code = grpc.StatusCode
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING


async def test_draining_refuses_new_calls_and_lets_those_under_way_end() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool, drain={"notice_s": 0.5, "grace_s": 20.0}) as started:
        watch = started.health.Watch(health_pb2.HealthCheckRequest())
        await watch.read()
        pool.released.clear()
        under_way = started.stub.EncodeImages(images(b"x"), timeout=30)
        await eventually(lambda: pool.in_flight == 1)
        draining = asyncio.create_task(started.router.drain())
        # First it is told; calls are still taken.
        assert (await watch.read()).status == NOT_SERVING
        during_notice = started.stub.EncodeImages(images(b"y"), timeout=30)
        await eventually(lambda: pool.in_flight == 2)
        # Then new calls are refused.
        await eventually(lambda: started.router._gate.closed.is_set())
        for call in (
            started.stub.EncodeImages(images(b"z"), timeout=10),
            started.stub.EncodeText(texts("z"), timeout=10),
            started.stub.ListModels(pb.ListModelsRequest(), timeout=10),
        ):
            error = await failure_of(call)
            assert error.code() is Code.UNAVAILABLE
            assert "shutting down" in error.details()
        assert await started.status() == NOT_SERVING
        assert not draining.done()
        pool.released.set()
        for call in (under_way, during_notice):
            assert (await call).results[0].HasField("embedding")
        await draining
    assert len(pool.requests) == 2


async def test_draining_answers_the_items_a_stream_has_sent_and_then_ends_it() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool) as started:
        pool.released.clear()
        call = started.stub.EncodeStream(timeout=30)
        for name in ("a", "b"):
            await call.write(image_item(name, b"x"))
        await eventually(lambda: pool.in_flight == 2)
        draining = asyncio.create_task(started.router.drain())
        await eventually(lambda: started.router._gate.closed.is_set())
        pool.released.set()
        answers = []

        async def read() -> None:
            async for answer in call:
                answers.append(answer)

        error = await failure_of(read())
        assert error.code() is Code.UNAVAILABLE
        assert "shutting down" in error.details()
        assert {answer.id for answer in answers} == {"a", "b"}
        assert all(answer.HasField("embedding") for answer in answers)
        await draining


async def test_draining_cuts_off_what_outlasts_the_grace() -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool, drain={"grace_s": 0.2}) as started:
        pool.released.clear()
        call = started.stub.EncodeImages(images(b"x"), timeout=30)
        await eventually(lambda: pool.in_flight == 1)
        await started.router.drain()
        error = await failure_of(call)
        assert error.code() in (Code.UNAVAILABLE, Code.CANCELLED)
        await eventually(lambda: pool.in_flight == 0)


async def test_reflection_shows_the_services() -> None:
    async with fleet(FakePool("vision-cpu")) as started:
        reflection = reflection_pb2_grpc.ServerReflectionStub(started.channel)
        requests = [
            reflection_pb2.ServerReflectionRequest(list_services=""),
            reflection_pb2.ServerReflectionRequest(file_containing_symbol="encoder.v1.EncoderService"),
        ]
        listed, described = [answer async for answer in reflection.ServerReflectionInfo(iter(requests), timeout=10)]
        names = {service.name for service in listed.list_services_response.service}
        assert {"encoder.v1.EncoderService", "grpc.health.v1.Health"} <= names
        file = descriptor_pb2.FileDescriptorProto.FromString(
            described.file_descriptor_response.file_descriptor_proto[0]
        )
        assert "EncodeStream" in {method.name for method in file.service[0].method}


async def test_reflection_can_be_turned_off() -> None:
    async with fleet(FakePool("vision-cpu"), reflection=False) as started:
        reflection = reflection_pb2_grpc.ServerReflectionStub(started.channel)
        call = reflection.ServerReflectionInfo(
            iter([reflection_pb2.ServerReflectionRequest(list_services="")]), timeout=10
        )
        error = await failure_of(call.read())
    assert error.code() is Code.UNIMPLEMENTED


async def test_metrics_are_served_and_count() -> None:
    pool = FakePool("vision-cpu", fallback_reason="mask need causal")
    async with fleet(pool, metrics_port=0, health={"interval_s": 600.0}) as started:
        probed = len(pool.probes)
        pool.failures.append(Failure(Code.UNAVAILABLE))
        for _ in range(3):
            await started.stub.EncodeImages(images(b"x", b"y"), timeout=10)
        # The failure is followed by one probe, which is an item at the pool too.
        speed = started.state("vision-cpu").speed
        await eventually(lambda: len(pool.probes) > probed and speed.in_flight == 0)
        await failure_of(started.stub.EncodeImages(images(), timeout=10))
        call = started.stub.EncodeStream(iter([image_item("a", b"x"), pb.EncodeStreamRequest(id="b")]), timeout=10)
        assert len([answer async for answer in call]) == 2
        pool.released.clear()
        under_way = started.stub.EncodeImages(images(b"x"), timeout=10)
        await eventually(lambda: pool.in_flight == 1)
        before = await scrape(started)
        pool.released.set()
        await under_way
        after = await scrape(started)
    of_images = 'method="EncodeImages",pool="vision-cpu"}'
    assert before['calls_total{code="OK",' + of_images] == 3.0
    assert before['calls_total{code="INVALID_ARGUMENT",method="EncodeImages",pool=""}'] == 1.0
    assert before["call_seconds_count{" + of_images] == 3.0
    assert before["items_total{" + of_images] == 6.0
    assert before['items_total{method="EncodeStream",pool="vision-cpu"}'] == 2.0
    assert before["request_bytes_total{" + of_images] == 3 * images(b"x", b"y").ByteSize()
    assert before["response_bytes_total{" + of_images] > 3 * 2 * 4 * 8
    assert before['calls_in_flight{method="EncodeImages"}'] == 1.0
    assert before['pool_in_flight_items{pool="vision-cpu"}'] == 1.0
    assert before['pool_calls_total{code="OK",pool="vision-cpu"}'] == 4.0
    assert before['pool_calls_total{code="UNAVAILABLE",pool="vision-cpu"}'] == 1.0
    assert before['pool_call_seconds_count{pool="vision-cpu"}'] == 5.0
    assert before['retries_total{pool="vision-cpu"}'] == 1.0
    assert before['fallbacks_total{pool="vision-cpu"}'] == 4.0
    assert before['stream_items_total{code="OK"}'] == 1.0
    assert before['stream_items_total{code="INVALID_ARGUMENT"}'] == 1.0
    assert (before['pool_healthy{pool="vision-cpu"}'], before['pool_quarantined{pool="vision-cpu"}']) == (1.0, 0.0)
    assert before['pool_ejected{pool="vision-cpu"}'] == 0.0
    assert before['pool_items_per_second{pool="vision-cpu"}'] > 0
    assert after['calls_in_flight{method="EncodeImages"}'] == 0.0
    assert after['pool_in_flight_items{pool="vision-cpu"}'] == 0.0
    assert after['calls_total{code="OK",' + of_images] == 4.0


async def test_metrics_count_replicas_that_were_demoted() -> None:
    demoted = FakePool("vision-npu", replicas=3, demoted=2)
    unproven = FakePool("vision-cpu", replicas=2, self_check=False)
    silent = FakePool("text", tower="text", report_failure=Failure(grpc.StatusCode.INTERNAL))
    async with fleet(demoted, unproven, silent, metrics_port=0) as started:
        told = await scrape(started)
    found = {
        pool: tuple(
            told[f'pool_{name}{{pool="{pool}"}}'] for name in ("replicas", "demoted_replicas", "failed_self_checks")
        )
        for pool in ("vision-npu", "vision-cpu", "text")
    }
    # A backend that is given up for another reason is no demotion.
    assert found == {"vision-npu": (3, 2, 2), "vision-cpu": (2, 0, 2), "text": (0, 0, 0)}


async def test_the_access_log_tells_the_call_and_never_its_content(lines: io.StringIO) -> None:
    vision, text = FakePool("vision-cpu"), FakePool("text", tower="text")
    async with fleet(vision, text) as started:
        secret = (("authorization", "Bearer topsecret"), ("x-request-id", "r1"))
        request = images(b"PICTURE", b"PICTURE2")
        await started.stub.EncodeImages(request, metadata=secret, timeout=10)
        await started.stub.EncodeText(texts("MYTEXT"), metadata=secret, timeout=10)
        await failure_of(started.stub.EncodeText(texts("MYTEXT", pool="x"), metadata=secret, timeout=10))
        call = started.stub.EncodeStream(iter([image_item("MYID", b"PICTURE")]), metadata=secret, timeout=10)
        assert len([answer async for answer in call]) == 1
    logged = [json.loads(line) for line in lines.getvalue().splitlines()]
    calls = [line for line in logged if line["event"] == "call"]
    assert [(line["method"], line["code"]) for line in calls] == [
        ("EncodeImages", "OK"),
        ("EncodeText", "OK"),
        ("EncodeText", "NOT_FOUND"),
        ("EncodeStream", "OK"),
    ]
    first = calls[0]
    assert (first["request_id"], first["pool"], first["attempts"], first["items"]) == ("r1", "vision-cpu", 1, 2)
    assert first["bytes_in"] == request.ByteSize()
    assert first["level"] == "INFO"
    assert calls[3]["items"] == 1
    for word in ("PICTURE", "MYTEXT", "MYID", "topsecret"):
        assert word not in lines.getvalue()
    assert {"pool_healthy", "serving", "listening"} <= {line["event"] for line in logged}


async def test_the_log_names_the_cause_of_a_pools_failure_without_quoting_the_request(lines: io.StringIO) -> None:
    pool = FakePool("vision-cpu")
    trace = 'Traceback (most recent call last):\n  File "/inside/x.py", line 3, in f\nValueError: MYTEXT'
    async with fleet(pool, retry={"attempts": 1}) as started:
        for number, failure in enumerate(
            [
                Failure(Code.INTERNAL, trace),
                Failure(Code.INVALID_ARGUMENT, "no such thing: MYTEXT"),
                Failure(Code.UNAVAILABLE, "ipv4:10.1.2.3:40000: connection refused"),
            ]
        ):
            pool.failures.append(failure)
            metadata = (("x-request-id", f"r{number}"),)
            await failure_of(started.stub.EncodeImages(images(b"x"), metadata=metadata, timeout=10))
    logged = [json.loads(line) for line in lines.getvalue().splitlines()]
    failed = [line for line in logged if line["event"] == "pool_call_failed"]
    assert [(line["level"], line["request_id"], line["cause"]) for line in failed] == [
        ("WARNING", "r0", "INTERNAL: ValueError (the trace is in the pool's own log)"),
        ("INFO", "r1", "INVALID_ARGUMENT"),
        ("INFO", "r2", "UNAVAILABLE: ipv4:10.1.2.3:40000: connection refused"),
    ]
    assert "MYTEXT" not in lines.getvalue()
    calls = [line for line in logged if line["event"] == "call"]
    assert [(line["level"], line["code"]) for line in calls][:2] == [
        ("WARNING", "INTERNAL"),
        ("INFO", "INVALID_ARGUMENT"),
    ]


async def test_a_fault_of_the_router_is_told_without_its_cause(
    lines: io.StringIO, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = FakePool("vision-cpu")
    async with fleet(pool) as started:

        def broken(*_: object) -> None:
            raise RuntimeError("private reason")

        monkeypatch.setattr(started.router.pools, "views", broken)
        error = await failure_of(
            started.stub.EncodeImages(images(b"x"), metadata=(("x-request-id", "r7"),), timeout=10)
        )
        call = started.stub.EncodeStream(iter([image_item("a", b"x")]), timeout=10)
        answer = await call.read()
    assert error.code() is Code.INTERNAL
    assert "private" not in error.details()
    assert "r7" in error.details()
    assert answer.error.code == Code.INTERNAL.value[0]
    assert "private" not in answer.error.message
    assert lines.getvalue().count("private reason") >= 2


async def test_a_port_that_is_taken_is_an_error_and_not_shared() -> None:
    async with fleet(FakePool("vision-cpu"), metrics_port=0) as started:
        for overrides in ({"port": started.router.port}, {"metrics_port": started.router.metrics_port}):
            second = Router(settings_for([{"name": "p", "address": NOWHERE}], **overrides))
            with pytest.raises(InvalidInput, match=str(next(iter(overrides.values())))):
                await second.start()
            await second.stop()


async def test_stopping_twice_is_no_error() -> None:
    async with fleet(FakePool("vision-cpu")) as started:
        await started.router.stop()
        await started.router.stop()


def test_transport_options() -> None:
    settings = settings_for(
        [{"name": "p", "address": NOWHERE}],
        max_message_bytes=5000,
        connection={"keepalive_s": 7.0, "max_age_s": 11.0, "max_age_grace_s": 13.0, "min_client_ping_s": 3.0},
    )
    options = dict(server_options(settings))
    assert options["grpc.max_receive_message_length"] == 5000
    assert options["grpc.so_reuseport"] == 0
    assert options["grpc.keepalive_time_ms"] == 7000
    assert options["grpc.keepalive_timeout_ms"] == options["grpc.http2.ping_timeout_ms"] == 10_000
    assert options["grpc.max_connection_age_ms"] == 11000
    assert options["grpc.max_connection_age_grace_ms"] == 13000
    assert options["grpc.http2.min_recv_ping_interval_without_data_ms"] == 3000
