"""Pools under a real Ray Serve: the same suite behind HAProxy and behind Serve's stock proxy.

The oracle of vectors is transformers' own CLIPModel on the demo checkpoint, with the same pixels.
"""

import asyncio
import contextlib
import itertools
import os
import shutil
import signal
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import grpc
import numpy as np
import psutil
import pytest
import torch
from transformers import AutoTokenizer, CLIPModel

from deployments import wire
from deployments.local import LocalFleet
from deployments.processes import port_is_free
from encoder.demo import demo_model_path
from encoder.errors import NotReady
from encoder.v1 import encoder_pb2 as pb
from encoder.v1 import encoder_pb2_grpc
from tests.deployments.fleets import MAX_TEXTS, TEXT, VISION, Started, start_side_by_side
from tests.deployments.test_service import failure, floats, until

pytestmark = [pytest.mark.serve, pytest.mark.timeout(600)]
Code = grpc.StatusCode
SIDE = 64
MEAN = np.array([0.48145466, 0.4578275, 0.40821073], np.float32)
STD = np.array([0.26862954, 0.26130258, 0.27577711], np.float32)
TEXTS = ["a red circle", "two blue squares left of a green triangle", ""]
UNLIMITED = [("grpc.max_send_message_length", -1), ("grpc.max_receive_message_length", -1)]


@pytest.fixture(scope="module")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Started]]:
    started = start_side_by_side(tmp_path_factory.mktemp("fleets"))
    try:
        for name in ("haproxy", "stock"):
            assert started[name].error is None
        yield started
    finally:
        for one in started.values():
            one.fleet.stop()


@pytest.fixture(scope="module", params=["haproxy", "stock"])
def fleet(request: pytest.FixtureRequest, fleets: dict[str, Started]) -> LocalFleet:
    return fleets[request.param].fleet


@pytest.fixture
async def client(fleet: LocalFleet) -> AsyncIterator[encoder_pb2_grpc.EncoderServiceStub]:
    """Straight to Serve, as the router does it."""
    async with grpc.aio.insecure_channel(fleet.addresses.serve_grpc, options=UNLIMITED) as channel:
        yield encoder_pb2_grpc.EncoderServiceStub(channel)


def to(pool: str, **more: str) -> dict[str, object]:
    return {"metadata": (("application", pool), *more.items()), "timeout": 60}


def deadline(milliseconds: str) -> dict[str, str]:
    return {wire.DEADLINE_METADATA: milliseconds}


def pictures(count: int, side: int = SIDE) -> np.ndarray:
    """uint8 [count, side, side, 3]."""
    return np.random.default_rng(5).integers(0, 256, (count, side, side, 3), np.uint8)


def image(pixels: np.ndarray) -> pb.Image:
    height, width, channels = pixels.shape
    return pb.Image(pixels=pb.RawPixels(data=pixels.tobytes(), height=height, width=width, channels=channels))


def of_images(*pixels: np.ndarray, **options: object) -> pb.EncodeImagesRequest:
    return pb.EncodeImagesRequest(images=map(image, pixels), options=pb.EncodeOptions(**options))


def of_texts(*texts: str) -> pb.EncodeTextRequest:
    return pb.EncodeTextRequest(texts=texts)


@pytest.fixture(scope="module")
def oracle() -> CLIPModel:
    return CLIPModel.from_pretrained(demo_model_path(), attn_implementation="eager").float().eval()


def unit_rows(vectors: torch.Tensor) -> np.ndarray:
    return torch.nn.functional.normalize(vectors.double(), dim=1).numpy()


class TestVectors:
    async def test_pictures(self, client, oracle):
        pixels = pictures(11)
        answer = await client.EncodeImages(of_images(*pixels), **to(VISION))
        inputs = ((pixels.astype(np.float32) / 255 - MEAN) / STD).transpose(0, 3, 1, 2)
        with torch.inference_mode():
            vision = oracle.vision_model(pixel_values=torch.from_numpy(inputs)).pooler_output
            expected = unit_rows(oracle.visual_projection(vision))
        found = np.stack([floats(result.embedding) for result in answer.results])
        np.testing.assert_allclose(found, expected, atol=2e-5)
        # They differ from each other by far more than from the oracle.
        assert np.abs(expected[0] - expected[1]).max() > 1e-3
        assert (answer.provenance.pool, answer.provenance.runner) == (VISION, "eager")

    async def test_texts(self, client, oracle):
        answer = await client.EncodeText(of_texts(*TEXTS), **to(TEXT))
        tokens = AutoTokenizer.from_pretrained(demo_model_path())(TEXTS, padding=True, return_tensors="pt")
        with torch.inference_mode():
            text = oracle.text_model(**{k: tokens[k] for k in ("input_ids", "attention_mask")}).pooler_output
            expected = unit_rows(oracle.text_projection(text))
        found = np.stack([floats(result.embedding) for result in answer.results])
        np.testing.assert_allclose(found, expected, atol=2e-5)

    async def test_a_stream(self, client):
        pixels = pictures(30)
        unary = await client.EncodeImages(of_images(*pixels), **to(VISION))
        requests = [pb.EncodeStreamRequest(id=str(i), image=image(one)) for i, one in enumerate(pixels)]
        requests.append(pb.EncodeStreamRequest(id="bad", image=pb.Image(encoded=b"junk")))
        found = {answer.id: answer async for answer in client.EncodeStream(iter(requests), **to(VISION))}
        assert len(found) == 31 and found["bad"].error.code == 3
        for i, result in enumerate(unary.results):
            np.testing.assert_allclose(floats(found[str(i)].embedding), floats(result.embedding), atol=2e-5)

    async def test_bad_items_stay_alone(self, client):
        request = of_images(*pictures(3))
        request.images[1].encoded = b"not a picture"
        answer = await client.EncodeImages(request, **to(VISION))
        assert [result.WhichOneof("outcome") for result in answer.results] == ["embedding", "error", "embedding"]
        assert answer.results[1].error.code == 3 and "\n" not in answer.results[1].error.message

    async def test_a_request_of_63_million_bytes(self, client):
        small = pictures(1)[0]
        large = np.repeat(np.repeat(small, 9, 0), 9, 1)
        request = of_images(*[large] * 63)
        assert 62_000_000 < request.ByteSize() < 64 * 1024 * 1024
        answer = await client.EncodeImages(request, **to(VISION))
        assert len(answer.results) == 63
        first = floats((await client.EncodeImages(of_images(large), **to(VISION))).results[0].embedding)
        for result in answer.results:
            np.testing.assert_allclose(floats(result.embedding), first, atol=2e-5)

    async def test_200_calls_at_once(self, client):
        calls = [client.EncodeImages(of_images(*pictures(1)), **to(VISION)) for _ in range(200)]
        answers = await asyncio.gather(*calls)
        assert {len(answer.results) for answer in answers} == {1}
        assert len({answer.provenance.replica for answer in answers}) == 2

    async def test_through_the_router(self, fleet):
        async with grpc.aio.insecure_channel(fleet.addresses.router) as channel:
            stub = encoder_pb2_grpc.EncoderServiceStub(channel)
            vision = await stub.EncodeImages(of_images(*pictures(1)), timeout=60)
            text = await stub.EncodeText(of_texts("a red circle"), timeout=60)
        assert (vision.provenance.pool, text.provenance.pool) == (VISION, TEXT)


class TestFailures:
    @pytest.mark.parametrize(
        ("pool", "request_", "code", "words"),
        [
            (VISION, of_images(), Code.INVALID_ARGUMENT, "no items"),
            (VISION, of_images(*pictures(1), dimensions=65), Code.INVALID_ARGUMENT, "dimensions=65"),
            (VISION, of_images(*pictures(1), model="other"), Code.NOT_FOUND, "model 'other'"),
            (VISION, of_images(*pictures(1), pool="elsewhere"), Code.NOT_FOUND, "pool 'elsewhere'"),
            (TEXT, of_images(*pictures(1)), Code.FAILED_PRECONDITION, "not its vision tower"),
            ("elsewhere", of_images(*pictures(1)), Code.NOT_FOUND, "elsewhere"),
        ],
    )
    async def test_code_and_line(self, client, pool, request_, code, words):
        failed = await failure(client.EncodeImages(request_, **to(pool)))
        assert failed.code() is code
        assert words in failed.details()
        assert "\n" not in failed.details() and "Traceback" not in failed.details()

    async def test_deadlines_in_metadata(self, client):
        late = await failure(client.EncodeImages(of_images(*pictures(1)), **to(VISION, **deadline("0"))))
        wrong = await failure(client.EncodeImages(of_images(*pictures(1)), **to(VISION, **deadline("soon"))))
        assert (late.code(), wrong.code()) == (Code.DEADLINE_EXCEEDED, Code.INVALID_ARGUMENT)
        assert wire.DEADLINE_METADATA in wrong.details()

    async def test_a_streams_deadline(self, client):
        async def slow() -> AsyncIterator[pb.EncodeStreamRequest]:
            yield pb.EncodeStreamRequest(id="first", image=image(pictures(1)[0]))
            await asyncio.sleep(30)

        with pytest.raises(grpc.aio.AioRpcError) as failed:
            async for _ in client.EncodeStream(slow(), **to(VISION, **deadline("300"))):
                pass
        assert failed.value.code() is Code.DEADLINE_EXCEEDED
        assert failed.value.details() == "the deadline went by before all items were computed"

    async def test_overload_says_when_to_come_back(self, client):
        calls = [client.EncodeText(of_texts(*["a red circle"] * MAX_TEXTS), **to(TEXT)) for _ in range(12)]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        refused = [answer for answer in answers if isinstance(answer, grpc.aio.AioRpcError)]
        assert 0 < len(refused) < len(calls)
        for error in refused:
            assert error.code() is Code.RESOURCE_EXHAUSTED
            assert wire.retry_delay_s(error.trailing_metadata()) > 0

    async def test_cancellation_reaches_the_replica(self, client):
        async def cancelled_calls() -> int:
            return (await reports(client, TEXT))[0].counters["calls_cancelled"]

        before = await cancelled_calls()
        # Cancelled later and later, until one was in the replica and not answered yet.
        waits = itertools.cycle([0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32])
        async with asyncio.timeout(120):
            while await cancelled_calls() == before:
                call = client.EncodeText(of_texts(*["a red circle"] * MAX_TEXTS), **to(TEXT))
                await asyncio.sleep(next(waits))
                call.cancel()

        async def room_is_free() -> bool:
            try:
                await client.EncodeText(of_texts(*["a"] * MAX_TEXTS), **to(TEXT))
            except grpc.aio.AioRpcError as error:
                assert error.code() is Code.RESOURCE_EXHAUSTED
                return False
            return True

        # What was cancelled leaves no room taken, once the forward that was under way is through.
        async with asyncio.timeout(60):
            while not await room_is_free():  # noqa: ASYNC110 - a server is asked, no event can tell
                await asyncio.sleep(0.05)


async def reports(client, pool: str) -> list[pb.ReplicaReport]:
    return list((await client.GetBackendReport(pb.GetBackendReportRequest(), **to(pool))).replicas)


class TestReplicas:
    async def test_one_replica_reports_for_all(self, fleet, client):
        found = await reports(client, VISION)
        assert len(found) == 2 and len({report.replica for report in found}) == 2
        ours = {process.pid for process in fleet.processes()}
        assert {report.pid for report in found} <= ours and len({report.pid for report in found}) == 2
        for report in found:
            assert psutil.Process(report.pid).nice() == psutil.Process().nice()
            assert (report.pool, report.model, report.tower) == (VISION, "demo", pb.TOWER_VISION)
            assert report.host and report.node and report.backend.name and report.self_checks
            assert report.versions["ray"] == "2.60.0" and report.compute_dtype == "float32"

    async def test_models(self, client):
        (model,) = (await client.ListModels(pb.ListModelsRequest(), **to(VISION))).models
        assert model == (await client.GetModel(pb.GetModelRequest(model="demo"), **to(VISION))).model
        assert (model.name, model.towers[0].dimensions, list(model.towers[0].pools)) == ("demo", 64, [VISION])
        failed = await failure(client.GetModel(pb.GetModelRequest(model="other"), **to(VISION)))
        assert failed.code() is Code.NOT_FOUND
        failed = await failure(client.GetBackendReport(pb.GetBackendReportRequest(pool="text"), **to(VISION)))
        assert failed.code() is Code.NOT_FOUND

    async def test_a_killed_replica_is_replaced(self, client):
        before = {report.replica: report.pid for report in await reports(client, VISION)}
        dead = sorted(before)[0]
        os.kill(before[dead], signal.SIGKILL)
        served: Counter[str] = Counter()
        async with asyncio.timeout(120):
            while not {name for name in served if name not in before}:
                try:
                    answer = await client.EncodeImages(of_images(*pictures(1)), **{**to(VISION), "timeout": 5})
                    served[answer.provenance.replica] += 1
                except grpc.aio.AioRpcError as error:
                    assert error.code() in (Code.UNAVAILABLE, Code.INTERNAL, Code.DEADLINE_EXCEEDED)
                await asyncio.sleep(0.05)
        assert dead not in served
        assert sum(count for name, count in served.items() if name in before) > 0


class TestLife:
    """After the suites; these end the fleets."""

    def test_progress_was_told(self, fleets):
        for name in ("haproxy", "stock"):
            events = fleets[name].events
            stages = [event.stage for event in events]
            assert stages[0] == "ray" and stages[-1] == "ready"
            assert stages.index("serve") < stages.index("pool") < stages.index("router")
            for pool in (VISION, TEXT):
                told = [event.message for event in events if event.pool == pool]
                assert told[-1] == "ready" and any("load demo" in message for message in told)

    def test_a_model_that_is_not_there(self, fleets):
        broken = fleets["broken"]
        assert isinstance(broken.error, NotReady)
        assert "nowhere" in str(broken.error) and "\n" not in str(broken.error)
        assert broken.events[-1].stage == "failed"
        assert broken.fleet.processes() == []
        logs = Path(str(broken.error).rpartition("(logs: ")[2].rstrip(")"))
        assert list(logs.glob("session_*/logs/serve/replica_*.log"))
        shutil.rmtree(logs)

    async def test_a_replica_that_hangs_is_told_of_in_the_report(self, fleets):
        """What answers is the other replica; a call that lands on the hanging one just ends at its deadline."""
        async with grpc.aio.insecure_channel(fleets["haproxy"].fleet.addresses.serve_grpc) as channel:
            stub = encoder_pb2_grpc.EncoderServiceStub(channel)
            hangs, _ = await reports(stub, VISION)
            os.kill(hangs.pid, signal.SIGSTOP)
            try:
                request, answer = pb.GetBackendReportRequest(), pb.GetBackendReportResponse()
                while not answer.unreachable:
                    with contextlib.suppress(grpc.aio.AioRpcError):
                        call = {**to(VISION, **deadline("2000")), "timeout": 4}
                        answer = await stub.GetBackendReport(request, **call)
            finally:
                os.kill(hangs.pid, signal.SIGCONT)
        assert [(lost.pool, lost.error.code) for lost in answer.unreachable] == [(VISION, 14)]
        assert hangs.replica not in [report.replica for report in answer.replicas] and answer.replicas

    async def test_a_stopped_fleet_leaves_nothing_and_the_other_goes_on(self, fleets):
        stopped, other = fleets["haproxy"].fleet, fleets["stock"].fleet
        addresses, folder, processes = stopped.addresses, stopped.folder, stopped.processes()
        names = {process.name() for process in processes}
        assert {"gcs_server", "raylet", "haproxy"} <= names
        await asyncio.to_thread(stopped.stop)
        assert stopped.processes() == []
        assert [process for process in processes if alive(process)] == []
        assert not folder.exists()
        for address in (addresses.serve_grpc, addresses.serve_http, addresses.router):
            assert port_is_free(int(address.rpartition(":")[2]))
        async with grpc.aio.insecure_channel(other.addresses.serve_grpc) as channel:
            stub = encoder_pb2_grpc.EncoderServiceStub(channel)
            assert len((await stub.EncodeImages(of_images(*pictures(2)), **to(VISION))).results) == 2

    async def test_a_fleet_whose_host_was_killed_can_still_be_ended(self, fleets):
        fleet = fleets["stock"].fleet
        (host,) = [process for process in fleet.processes() if "deployments.fleet_host" in process.cmdline()]
        host.kill()
        await until(lambda: not alive(host))
        await asyncio.to_thread(fleet.stop)
        assert fleet.processes() == []


def alive(process: psutil.Process) -> bool:
    return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
