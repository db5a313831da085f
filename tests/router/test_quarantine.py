"""Pools whose vectors do not belong to the fleet's: found, kept out, told of, and let in again."""

import asyncio
import io
import json
import time
from typing import Any

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

from encoder.golden import golden_pictures, golden_texts
from encoder.v1 import encoder_pb2 as pb

from .fake_pool import Failure, FakePool
from .harness import Fleet, eventually, failure_of, fleet, images, scrape, texts
from .test_stream import answers, image_item

Code = grpc.StatusCode
SERVING = health_pb2.HealthCheckResponse.SERVING
NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# Probes are not what is under test, and shall not come in between.
SELDOM = {"interval_s": 0.1, "refresh_s": 60.0}


async def report(started: Fleet, pool: str = "") -> pb.GetBackendReportResponse:
    return await started.stub.GetBackendReport(pb.GetBackendReportRequest(pool=pool), timeout=10)


async def until_quarantined(started: Fleet, pool: str, expected: bool = True) -> None:
    await eventually(lambda: bool(started.state(pool).quarantine) is expected)


async def pools_that_serve(started: Fleet, calls: int = 6, **options: Any) -> set[str]:
    """Who answers several calls at once, and one after the other."""
    at_once = await asyncio.gather(
        *(started.stub.EncodeImages(images(b"x", **options), timeout=10) for _ in range(calls))
    )
    in_turn = [await started.stub.EncodeImages(images(b"x", **options), timeout=10) for _ in range(calls)]
    return {answer.provenance.pool for answer in (*at_once, *in_turn)}


async def test_the_golden_inputs_are_those_of_the_encoder() -> None:
    vision, text = FakePool("vision-cpu"), FakePool("text", tower="text", model="siglip")
    async with fleet(vision, text):
        pass
    request = pb.EncodeImagesRequest.FromString(vision.goldens[0].request)
    assert request.options.model == "clip"
    assert not request.options.HasField("normalize")
    found = [image.pixels for image in request.images]
    assert [(one.height, one.width, one.channels) for one in found] == [(66, 90, 3)] * 4
    for pixels, golden in zip(found, golden_pictures(66, 90), strict=True):
        shown = np.frombuffer(pixels.data, np.uint8).reshape(66, 90, 3)
        np.testing.assert_array_equal(shown, np.moveaxis(golden, 0, -1))
    sent = pb.EncodeTextRequest.FromString(text.goldens[0].request)
    assert (sent.options.model, tuple(sent.texts)) == ("siglip", golden_texts())
    assert vision.goldens[0].metadata["application"] == "vision-cpu"


async def test_a_pool_that_computes_other_vectors_gets_no_traffic_and_is_told_of(lines: io.StringIO) -> None:
    good, wrong, third = FakePool("vision-a"), FakePool("vision-b", cosine=0.9), FakePool("vision-c", cosine=0.999)
    text = FakePool("text", tower="text")
    async with fleet(good, wrong, third, text, metrics_port=0) as started:
        await until_quarantined(started, "vision-b")
        assert await pools_that_serve(started) <= {"vision-a", "vision-c"}
        assert not wrong.requests

        error = await failure_of(started.stub.EncodeImages(images(b"x", pool="vision-b"), timeout=10))
        assert error.code() is Code.FAILED_PRECONDITION
        assert "pool 'vision-b' is in quarantine" in error.details()
        assert "cosine 0.9000 to those of pool" in error.details()
        assert not wrong.requests

        stream = [image_item(str(number), b"x") for number in range(20)] + [image_item("p", b"x", pool="vision-b")]
        got = await answers(started, stream)
        assert got["p"].error.code == Code.FAILED_PRECONDITION.value[0]
        assert {got[str(number)].provenance.pool for number in range(20)} <= {"vision-a", "vision-c"}

        assert await started.status("vision-b") == NOT_SERVING
        for service in ("", "vision-a", "vision-c", "text"):
            assert await started.status(service) == SERVING

        told = await report(started)
        status = {one.pool: one for one in told.pools}
        assert {name: (one.healthy, one.quarantined) for name, one in status.items()} == {
            "vision-a": (True, False), "vision-b": (True, True), "vision-c": (True, False), "text": (True, False),
        }  # fmt: skip
        assert "cosine 0.9000" in status["vision-b"].reason
        assert (status["vision-a"].reason, status["vision-a"].fingerprint) == ("", "f1")
        assert (status["vision-a"].model, status["vision-a"].revision) == ("clip", "r1")
        agreement = {(one.pool_a, one.pool_b): one for one in told.agreement}
        assert agreement.keys() == {("vision-a", "vision-b"), ("vision-a", "vision-c"), ("vision-b", "vision-c")}
        assert agreement["vision-a", "vision-b"].worst_cosine == pytest.approx(0.9, abs=1e-4)
        assert agreement["vision-a", "vision-c"].worst_cosine == pytest.approx(0.999, abs=1e-4)
        assert agreement["vision-a", "vision-b"].tower == pb.TOWER_VISION

        only = await report(started, "vision-c")
        assert [one.pool for one in only.pools] == ["vision-c"]
        assert {(one.pool_a, one.pool_b) for one in only.agreement} == {
            ("vision-a", "vision-c"), ("vision-b", "vision-c"),
        }  # fmt: skip
        metrics = await scrape(started)
    assert metrics['pool_quarantined{pool="vision-b"}'] == 1.0
    assert metrics['pool_quarantined{pool="vision-a"}'] == 0.0
    assert metrics['quarantines_total{pool="vision-b"}'] == 1.0
    told_of = [json.loads(line) for line in lines.getvalue().splitlines() if "pool_quarantined" in line]
    # While only two of three have answered there is no majority, and the later one may be told of for a moment.
    assert ("WARNING", "vision-b") in [(line["level"], line["pool"]) for line in told_of]


async def test_a_pool_comes_back_when_it_agrees_again() -> None:
    good, other = FakePool("vision-a"), FakePool("vision-b", cosine=0.5)
    async with fleet(good, other, health=SELDOM) as started:
        await until_quarantined(started, "vision-b")
        checked = len(other.goldens)
        await eventually(lambda: len(other.goldens) >= checked + 2)
        assert started.state("vision-b").quarantine
        other.cosine = 1.0
        await until_quarantined(started, "vision-b", False)
        for _ in range(500):
            if await started.status("vision-b") == SERVING:
                break
            await asyncio.sleep(0.01)
        assert await pools_that_serve(started) == {"vision-a", "vision-b"}
        await started.stub.EncodeImages(images(b"x", pool="vision-b"), timeout=10)


async def test_a_pool_that_changes_while_it_serves_is_found_at_the_next_check() -> None:
    first, second, third = FakePool("vision-a"), FakePool("vision-b"), FakePool("vision-c")
    async with fleet(first, second, third, health=SELDOM, agreement={"interval_s": 0.2}) as started:
        assert "vision-a" in await pools_that_serve(started)
        first.cosine = 0.0
        await until_quarantined(started, "vision-a")
        seen = len(first.requests)
        assert await pools_that_serve(started) <= {"vision-b", "vision-c"}
        assert len(first.requests) == seen


async def test_text_pools_are_held_against_each_other_too() -> None:
    first, second = FakePool("text-a", tower="text"), FakePool("text-b", tower="text", cosine=0.9)
    async with fleet(first, second) as started:
        await until_quarantined(started, "text-b")
        answer = await started.stub.EncodeText(texts("x"), timeout=10)
        assert answer.provenance.pool == "text-a"
        assert [one.tower for one in (await report(started)).agreement] == [pb.TOWER_TEXT]


async def test_different_models_are_not_held_against_each_other() -> None:
    first, second = FakePool("vision-a"), FakePool("vision-b", model="siglip", cosine=0.0, fingerprint="f9")
    async with fleet(first, second) as started:
        assert not started.state("vision-a").quarantine
        assert not started.state("vision-b").quarantine
        assert not (await report(started)).agreement


async def test_agreement_can_be_turned_off() -> None:
    first, second = FakePool("vision-a"), FakePool("vision-b", cosine=0.0, fingerprint="f2")
    async with fleet(first, second, agreement={"enabled": False}) as started:
        assert await pools_that_serve(started) == {"vision-a", "vision-b"}
        assert not (await report(started)).agreement
    assert not first.goldens


async def test_the_least_cosine_is_a_setting() -> None:
    first, second = FakePool("vision-a"), FakePool("vision-b", cosine=0.99)
    async with fleet(first, second, agreement={"cosine": 0.985}) as started:
        assert await pools_that_serve(started) == {"vision-a", "vision-b"}


async def test_a_replica_that_computes_otherwise_is_found_among_its_fellows() -> None:
    good, torn = FakePool("vision-a"), FakePool("vision-b", replicas=4)
    torn.wrong_replicas = {"vision-b-3"}
    async with fleet(good, torn) as started:
        await until_quarantined(started, "vision-b")
        told = await report(started)
        agreement = {(one.pool_a, one.pool_b): one.worst_cosine for one in told.agreement}
        assert agreement["vision-b", "vision-b"] == pytest.approx(-1.0)
        assert agreement["vision-a", "vision-b"] == pytest.approx(-1.0)


async def test_replicas_that_were_not_reached_are_reached_later() -> None:
    pool = FakePool("vision-a", replicas=6)
    other = FakePool("vision-b")
    pool.wrong_replicas = {"vision-a-5"}
    async with fleet(pool, other, health=SELDOM, agreement={"max_calls": 4}) as started:
        await until_quarantined(started, "vision-a")


async def test_new_replicas_are_checked_when_they_are_seen(lines: io.StringIO) -> None:
    good, other = FakePool("vision-a"), FakePool("vision-b")
    health = {"interval_s": 600.0, "refresh_s": 600.0}
    async with fleet(good, other, health=health) as started:
        checked = len(other.goldens)
        for _ in range(3):
            await started.stub.EncodeImages(images(b"x", pool="vision-b"), timeout=10)
        assert len(other.goldens) == checked
        # A new replica takes over, and computes something else.
        other.generation, other.cosine = "-new", 0.0
        await failure_or_answer(started, "vision-b")
        await until_quarantined(started, "vision-b")
        assert len(other.goldens) > checked
        assert "cosine" in started.state("vision-b").quarantine


async def failure_or_answer(started: Fleet, pool: str) -> None:
    await started.stub.EncodeImages(images(b"x", pool=pool), timeout=10)


async def test_replicas_never_seen_before_do_not_make_the_router_check_without_end() -> None:
    pool, other = FakePool("vision-a"), FakePool("vision-b")
    health = {"interval_s": 600.0, "recheck_s": 0.5}
    async with fleet(pool, other, health=health, agreement={"recheck_s": 0.5, "max_calls": 4}) as started:
        checked, asked, began = len(pool.goldens), pool.reports, time.monotonic()
        for number in range(60):
            pool.generation = f"-{number}"
            await started.stub.EncodeImages(images(b"x", pool="vision-a"), timeout=10)
            await asyncio.sleep(0.02)
        rounds = (time.monotonic() - began) / 0.5 + 2
        assert 1 <= pool.reports - asked <= rounds
        assert 1 <= len(pool.goldens) - checked <= 4 * rounds


class TestFingerprints:
    async def test_a_pool_of_another_fingerprint_is_kept_out(self) -> None:
        first, second, third = FakePool("vision-a", fingerprint="f2"), FakePool("vision-b"), FakePool("vision-c")
        async with fleet(first, second, third) as started:
            await until_quarantined(started, "vision-a")
            assert await pools_that_serve(started) == {"vision-b", "vision-c"}
            error = await failure_of(started.stub.EncodeImages(images(b"x", pool="vision-a"), timeout=10))
            assert error.code() is Code.FAILED_PRECONDITION
            assert "fingerprint f2" in error.details()
            assert "under f1" in error.details()

    async def test_no_answer_under_another_fingerprint_is_passed_on(self) -> None:
        # The first one is the quickest, so that it is asked first.
        pools = [FakePool("vision-a")] + [FakePool(name, latency_s=0.1) for name in ("vision-b", "vision-c")]
        health = {"interval_s": 600.0, "refresh_s": 600.0}
        async with fleet(*pools, health=health) as started:
            # It changes, and the very next call goes there.
            pools[0].fingerprint, pools[0].revision = "f2", "r2"
            answers_seen = [await started.stub.EncodeImages(images(b"x"), timeout=10) for _ in range(10)]
            assert {answer.provenance.fingerprint for answer in answers_seen} == {"f1"}
            assert pools[0].requests
            assert started.state("vision-a").quarantine
            # The others follow, one by one, as an update does: never are two fingerprints answered at once.
            seen: list[str] = []
            stop = asyncio.Event()

            async def traffic() -> None:
                while not stop.is_set():
                    try:
                        answer = await started.stub.EncodeImages(images(b"x"), timeout=10)
                        seen.append(answer.provenance.fingerprint)
                    except grpc.aio.AioRpcError as error:
                        assert error.code() is Code.UNAVAILABLE
                    await asyncio.sleep(0.005)

            running = asyncio.create_task(traffic())
            for pool in pools[1:]:
                pool.fingerprint, pool.revision = "f2", "r2"
                await asyncio.sleep(0.5)
            await eventually(lambda: seen[-5:] == ["f2"] * 5)
            stop.set()
            await running
            change = seen.index("f2")
            assert "f2" not in seen[:change]
            assert set(seen[change:]) == {"f2"}

    async def test_a_pinned_call_is_told_why_its_answer_is_not_passed_on(self) -> None:
        pools = [FakePool("vision-a"), FakePool("vision-b"), FakePool("vision-c")]
        async with fleet(*pools, health={"interval_s": 600.0, "refresh_s": 600.0}) as started:
            pools[0].fingerprint = "f2"
            error = await failure_of(started.stub.EncodeImages(images(b"x", pool="vision-a"), timeout=10))
            assert error.code() is Code.FAILED_PRECONDITION
            assert "fingerprint f1 and f2" in error.details()
            assert len(pools[0].requests) == 1

    async def test_a_pool_alone_may_be_updated_without_a_gap(self) -> None:
        pool = FakePool("vision-a", replicas=2)
        async with fleet(pool, health=SELDOM) as started:
            pool.replica_fingerprints = {"vision-a-1": "f2"}
            for _ in range(10):
                await started.stub.EncodeImages(images(b"x"), timeout=10)
            pool.replica_fingerprints = {}
            pool.fingerprint = "f2"
            for _ in range(10):
                answer = await started.stub.EncodeImages(images(b"x"), timeout=10)
                assert answer.provenance.fingerprint == "f2"


class TestReference:
    async def test_of_two_that_disagree_the_later_one_leaves(self) -> None:
        async with fleet(FakePool("vision-a"), FakePool("vision-b", cosine=0.9)) as started:
            await until_quarantined(started, "vision-b")
            assert await pools_that_serve(started) == {"vision-a"}

    @pytest.mark.parametrize("worse", [{"self_check": False}, {"self_check": None}, {"dtype": "int8"}], ids=str)
    async def test_the_one_that_has_proven_less_leaves(self, worse: dict[str, Any]) -> None:
        first, second = FakePool("vision-a", **worse), FakePool("vision-b", cosine=0.9)
        async with fleet(first, second) as started:
            await until_quarantined(started, "vision-a")
            assert await pools_that_serve(started) == {"vision-b"}

    async def test_a_reference_that_is_down_still_keeps_the_foreign_one_out(self) -> None:
        good, wrong = FakePool("vision-a"), FakePool("vision-b", cosine=0.5)
        async with fleet(good, wrong, health={"failures": 1, **SELDOM}, retry={"attempts": 1}) as started:
            await until_quarantined(started, "vision-b")
            good.broken = Failure(Code.UNAVAILABLE, "restarting")
            await eventually(lambda: not started.state("vision-a").healthy)
            checked = len(wrong.goldens)
            await eventually(lambda: len(wrong.goldens) >= checked + 2)
            error = await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
            assert error.code() is Code.UNAVAILABLE
            assert "vision-b is in quarantine" in error.details()
            assert await started.status() == NOT_SERVING
            good.broken = None
            await started.until_healthy("vision-a")
            assert await pools_that_serve(started) == {"vision-a"}
        assert not wrong.requests

    async def test_but_not_for_ever(self) -> None:
        first, second = FakePool("vision-a"), FakePool("vision-b", cosine=0.5)
        health = {"failures": 1, **SELDOM}
        async with fleet(first, second, health=health, agreement={"memory_s": 0.3}) as started:
            await until_quarantined(started, "vision-b")
            first.broken = Failure(Code.UNAVAILABLE, "gone")
            await until_quarantined(started, "vision-b", False)
            assert await pools_that_serve(started) == {"vision-b"}


class TestStart:
    async def test_no_pool_serves_before_it_was_checked(self) -> None:
        pool = FakePool("vision-a", golden_failure=Failure(Code.INTERNAL, "the forward failed"))
        async with fleet(pool, wait=False) as started:
            await eventually(lambda: len(pool.goldens) >= 3)
            assert not started.state("vision-a").healthy
            assert "the forward failed" in started.state("vision-a").reason
            error = await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
            assert error.code() is Code.UNAVAILABLE
            pool.golden_failure = None
            await started.until_healthy("vision-a")

    async def test_the_first_to_answer_waits_for_the_others(self) -> None:
        # The foreign one is quick; the reference needs a moment.
        wrong, good = FakePool("vision-a", cosine=0.5, self_check=False), FakePool("vision-b", latency_s=0.2)
        async with fleet(wrong, good, wait=False, agreement={"settle_s": 20.0}) as started:
            await started.until_healthy("vision-b")
            await eventually(lambda: started.state("vision-a").healthy)
            assert started.state("vision-a").quarantine
            assert await pools_that_serve(started) == {"vision-b"}
        assert not wrong.requests

    async def test_but_not_longer_than_it_must(self) -> None:
        hung, quick = FakePool("vision-a", hold_probes=True), FakePool("vision-b")
        health = {"timeout_s": 60.0}
        async with fleet(hung, quick, wait=False, health=health, agreement={"settle_s": 0.3}) as started:
            await started.until_healthy("vision-b")
            await started.stub.EncodeImages(images(b"x"), timeout=10)

    async def test_a_pool_that_takes_fewer_items_a_call_says_which_setting_helps(self) -> None:
        refusal = Failure(Code.INVALID_ARGUMENT, "4 images are above the limit of 2")
        pool = FakePool("vision-a", golden_failure=refusal)
        async with fleet(pool, wait=False) as started:
            await eventually(lambda: "items_per_call" in started.state("vision-a").reason)
            assert "above the limit of 2" in started.state("vision-a").reason

    @pytest.mark.parametrize(("per_call", "sizes"), [(4, [4]), (3, [3, 1]), (1, [1, 1, 1, 1])])
    async def test_the_golden_inputs_can_be_sent_in_several_calls(self, per_call: int, sizes: list[int]) -> None:
        first, second = FakePool("vision-a", replicas=2), FakePool("vision-b", cosine=0.9)
        async with fleet(first, second, agreement={"items_per_call": per_call, "interval_s": 600.0}) as started:
            await until_quarantined(started, "vision-b")
            sent = [len(pb.EncodeImagesRequest.FromString(seen.request).images) for seen in second.goldens]
            assert sent[: len(sizes)] == sizes
            # Each of the two replicas has seen all four.
            evidence = started.router.quarantine._shown["vision", "clip"]["vision-a"]
            assert {name: sorted(vectors) for name, vectors in evidence.vectors.items()} == {
                "vision-a-0": [0, 1, 2, 3], "vision-a-1": [0, 1, 2, 3],
            }  # fmt: skip

    async def test_a_busy_pool_is_checked_later_and_serves_meanwhile(self) -> None:
        pool = FakePool("vision-a")
        async with fleet(pool, health=SELDOM, agreement={"interval_s": 0.1}) as started:
            pool.golden_failure = Failure(Code.RESOURCE_EXHAUSTED, "queue full")
            checked = len(pool.goldens)
            await eventually(lambda: len(pool.goldens) >= checked + 3)
            assert started.state("vision-a").in_force
            await started.stub.EncodeImages(images(b"x"), timeout=10)
