"""EncoderCore over plain gRPC with an engine whose vectors are a formula: every answer a client can get."""

import asyncio
import dataclasses
from collections import Counter

import grpc
import numpy as np
import pytest

from deployments import wire
from encoder.v1 import encoder_pb2 as pb
from tests.deployments.formula import DIMENSIONS, MAX_BATCH, FormulaEngine, seed_of, vector_of
from tests.deployments.plain_server import images, serving

Code = grpc.StatusCode
DEADLINE = wire.DEADLINE_METADATA


def floats(embedding: pb.Embedding) -> np.ndarray:
    return np.frombuffer(embedding.values, "<f4")


def unit(vector: np.ndarray) -> np.ndarray:
    return vector / np.sqrt((vector.astype(np.float64) ** 2).sum())


async def failure(call) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    return failed.value


async def until(condition, limit_s: float = 10.0) -> None:
    async with asyncio.timeout(limit_s):
        while not condition():  # noqa: ASYNC110  # what is watched sets no event
            await asyncio.sleep(0.005)


async def _of(call):
    return await call


class TestImages:
    async def test_each_image_gets_its_own_vector_in_order(self):
        sources = [b"a", b"bb", b"ccc", b"dd", b"e", b"f"]
        async with serving(FormulaEngine()) as (client, _):
            answer = await client.EncodeImages(images(*sources))
        assert [result.WhichOneof("outcome") for result in answer.results] == ["embedding"] * 6
        for source, result in zip(sources, answer.results, strict=True):
            assert result.embedding.dimensions == DIMENSIONS
            assert result.embedding.dtype == pb.EMBEDDING_DTYPE_FLOAT32
            np.testing.assert_allclose(floats(result.embedding), unit(vector_of(seed_of(source))), rtol=1e-6)

    async def test_a_small_request_is_decoded_between_a_big_ones_pictures(self):
        decoded: list[bytes] = []

        class Noting(FormulaEngine):
            def prepare_image(self, source):
                decoded.append(source)
                return super().prepare_image(source)

        engine = Noting()
        engine.decode_gate.clear()
        async with serving(engine) as (client, _):
            big = asyncio.create_task(_of(client.EncodeImages(images(*(b"big%d" % i for i in range(30))))))
            await until(lambda: decoded)
            small = asyncio.create_task(_of(client.EncodeImages(images(b"small"))))
            await asyncio.sleep(0.3)  # it arrives while nothing moves
            engine.decode_gate.set()
            await asyncio.gather(big, small)
        assert decoded.index(b"small") <= 6 and len(decoded) == 31

    async def test_pixels_are_taken_too(self):
        pixels = pb.RawPixels(data=b"\x01\x02\x03\x04\x05\x06", height=1, width=2, channels=3)
        async with serving(FormulaEngine()) as (client, _):
            answer = await client.EncodeImages(pb.EncodeImagesRequest(images=[pb.Image(pixels=pixels)]))
        np.testing.assert_allclose(floats(answer.results[0].embedding), unit(vector_of(21)), rtol=1e-6)

    async def test_an_item_that_fails_is_answered_beside_its_neighbours(self):
        engine = FormulaEngine()
        request = images(b"ok1", b"bad", b"bug", b"poison", b"ok2")
        request.images.append(pb.Image())
        request.images.append(pb.Image(pixels=pb.RawPixels(data=b"12", height=5, width=5, channels=3)))
        async with serving(engine) as (client, _):
            answer = await client.EncodeImages(request)
        kinds = [result.WhichOneof("outcome") for result in answer.results]
        assert kinds == ["embedding", "error", "error", "error", "embedding", "error", "error"]
        errors = {i: (r.error.code, r.error.message) for i, r in enumerate(answer.results) if r.HasField("error")}
        assert errors[1] == (3, "the picture is broken")
        assert errors[2] == (13, wire.INTERNAL_MESSAGE)
        assert errors[3] == (13, "the device refused this item")
        assert errors[5][0] == 3 and "neither" in errors[5][1]
        assert errors[6] == (3, "pixels do not fill the picture")
        for i, source in ((0, b"ok1"), (4, b"ok2")):
            np.testing.assert_allclose(floats(answer.results[i].embedding), unit(vector_of(seed_of(source))), rtol=1e-6)
        assert engine.counters["item_errors"] == 5

    async def test_nothing_but_errors_is_an_answer_too(self):
        async with serving(FormulaEngine()) as (client, _):
            answer = await client.EncodeImages(images(b"bad"))
        assert answer.results[0].error.code == 3
        assert answer.provenance.attention_backend == "sdpa" and answer.provenance.runner == ""

    async def test_output_options(self):
        raw = vector_of(seed_of(b"x"))
        async with serving(FormulaEngine()) as (client, _):
            cut = (await client.EncodeImages(images(b"x", dimensions=4, normalize=False))).results[0].embedding
            normal = (await client.EncodeImages(images(b"x", dimensions=4))).results[0].embedding
            packed = await client.EncodeImages(images(b"x", dtype=pb.EMBEDDING_DTYPE_BINARY))
        np.testing.assert_array_equal(floats(cut), raw[:4])
        np.testing.assert_allclose(floats(normal), unit(raw[:4]), rtol=1e-6)
        expected = np.packbits(raw > 0, bitorder="big").tobytes()
        assert packed.results[0].embedding.values == expected
        assert packed.results[0].embedding.dimensions == DIMENSIONS

    async def test_provenance_and_timings(self):
        engine = FormulaEngine(fallback_reason="mask")
        async with serving(engine) as (client, _):
            answer = await client.EncodeImages(images(b"a", b"b", model="formula", pool="vision-cpu"))
        source = answer.provenance
        assert (source.model, source.model_revision, source.fingerprint) == ("formula", "r1", "f00d")
        assert (source.pool, source.replica) == ("vision-cpu", "r-1")
        assert (source.attention_backend, source.runner) == ("sdpa", "eager")
        assert (source.fallback, source.fallback_reason) == (True, "mask")
        spent = answer.timings
        assert 1 <= spent.batch_size <= 2
        assert 0 < spent.preprocess_ms <= spent.total_ms and 0 < spent.forward_ms <= spent.total_ms

    async def test_no_fallback_is_said_so(self):
        async with serving(FormulaEngine()) as (client, _):
            source = (await client.EncodeImages(images(b"a"))).provenance
        assert (source.fallback, source.fallback_reason) == (False, "")

    async def test_what_waits_together_shares_a_forward(self):
        engine = FormulaEngine()
        engine.gate.clear()
        async with serving(engine, decode_threads=4) as (client, core):
            calls = [client.EncodeImages(images(b"a" * (i + 1))) for i in range(1 + MAX_BATCH)]
            await until(lambda: core._room.items == 1 + MAX_BATCH and core._pipeline._batcher.waiting >= MAX_BATCH)
            engine.gate.set()
            answers = await asyncio.gather(*calls)
        assert engine.batches == [1, MAX_BATCH]
        assert Counter(answer.timings.batch_size for answer in answers) == {MAX_BATCH: MAX_BATCH, 1: 1}

    async def test_a_device_that_takes_batches_ahead_has_two_full_ones(self):
        engine = FormulaEngine()
        engine.lane_batch, engine.takes_ahead = 2, True
        engine.gate.clear()
        sources = [b"first", b"second", b"third", b"fourth"]
        async with serving(engine) as (client, core):
            call = asyncio.create_task(_of(client.EncodeImages(images(*sources))))
            await until(lambda: len(core._pipeline._batcher._running) == 2)
            engine.gate.set()
            answer = await call
        for source, result in zip(sources, answer.results, strict=True):
            np.testing.assert_allclose(floats(result.embedding), unit(vector_of(seed_of(source))), rtol=1e-6)


class TestTexts:
    async def test_vectors_token_counts_and_truncation(self):
        long = " ".join(["abc"] * 11)
        async with serving(FormulaEngine("text")) as (client, _):
            answer = await client.EncodeText(pb.EncodeTextRequest(texts=["a bb", long, ""]))
        np.testing.assert_allclose(floats(answer.results[0].embedding), unit(vector_of(3)), rtol=1e-6)
        np.testing.assert_allclose(floats(answer.results[1].embedding), unit(vector_of(24)), rtol=1e-6)
        assert [(r.token_count, r.truncated) for r in answer.results] == [(2, False), (11, True), (0, False)]

    async def test_a_text_that_is_too_long_can_be_refused(self):
        options = pb.EncodeOptions(text_overflow=pb.TEXT_OVERFLOW_REFUSE)
        async with serving(FormulaEngine("text")) as (client, _):
            answer = await client.EncodeText(pb.EncodeTextRequest(texts=["ok", "a " * 9], options=options))
        assert answer.results[0].HasField("embedding")
        assert (answer.results[1].error.code, answer.results[1].error.message) == (3, "9 tokens, the model takes 8")


class TestWholeCallErrors:
    @pytest.mark.parametrize(
        ("request_", "code", "words"),
        [
            (images(), Code.INVALID_ARGUMENT, "no items"),
            (images(*[b"x"] * 6), Code.INVALID_ARGUMENT, "6 items, this pool takes 5"),
            (images(b"x" * 3000), Code.INVALID_ARGUMENT, "this pool takes 2048"),
            (images(b"x", dimensions=DIMENSIONS + 1), Code.INVALID_ARGUMENT, "dimensions=13"),
            (images(b"x", dtype=77), Code.INVALID_ARGUMENT, "77 is unknown"),
            (images(b"x", model="other"), Code.NOT_FOUND, "model 'other'"),
            (images(b"x", pool="vision-gpu"), Code.NOT_FOUND, "pool 'vision-gpu'"),
        ],
    )
    async def test_code_and_line(self, request_, code, words):
        async with serving(FormulaEngine(), max_items_per_request=5, max_request_bytes=2048) as (client, _):
            failed = await failure(client.EncodeImages(request_))
        assert failed.code() is code
        assert words in failed.details() and "\n" not in failed.details() and "Traceback" not in failed.details()

    async def test_as_many_dimensions_as_there_are(self):
        async with serving(FormulaEngine()) as (client, _):
            answer = await client.EncodeImages(images(b"x", dimensions=DIMENSIONS))
        assert answer.results[0].embedding.dimensions == DIMENSIONS

    async def test_the_other_tower(self):
        async with serving(FormulaEngine("vision")) as (client, _):
            failed = await failure(client.EncodeText(pb.EncodeTextRequest(texts=["a"])))
        assert failed.code() is Code.FAILED_PRECONDITION
        assert "serves the vision tower of formula, not its text tower" in failed.details()

    async def test_a_model_for_pictures_alone_says_why_it_takes_no_texts(self):
        engine = FormulaEngine("vision")
        engine.info = dataclasses.replace(engine.info, vision_only=True)
        async with serving(engine) as (client, _):
            failed = await failure(client.EncodeText(pb.EncodeTextRequest(texts=["a"])))
        assert failed.code() is Code.FAILED_PRECONDITION
        assert "formula is a clip model, for pictures alone: it has no text tower" in failed.details()

    async def test_overload_says_when_to_come_back(self):
        engine = FormulaEngine()
        engine.gate.clear()
        async with serving(engine, max_waiting_items=4, max_items_per_request=4) as (client, core):
            first = client.EncodeImages(images(b"a", b"b", b"c"))
            await until(lambda: core._room.items == 3)
            failed = await failure(client.EncodeImages(images(b"d", b"e")))
            fits = client.EncodeImages(images(b"f"))
            await until(lambda: core._room.items == 4)
            engine.gate.set()
            assert len((await first).results) == 3 and len((await fits).results) == 1
            assert core._room.items == 0
        assert failed.code() is Code.RESOURCE_EXHAUSTED
        assert wire.retry_delay_s(failed.trailing_metadata()) >= 0.05
        assert engine.counters["calls_overloaded"] == 1

    async def test_too_many_bytes_are_an_overload_too(self):
        engine = FormulaEngine()
        engine.gate.clear()
        async with serving(engine, max_waiting_bytes=5000, max_request_bytes=4000) as (client, core):
            first = client.EncodeImages(images(b"a" * 3000))
            await until(lambda: core._room.items == 1)
            failed = await failure(client.EncodeImages(images(b"a" * 3000)))
            engine.gate.set()
            await first
        assert failed.code() is Code.RESOURCE_EXHAUSTED

    async def test_after_close(self):
        async with serving(FormulaEngine()) as (client, core):
            await core.close()
            failed = await failure(client.EncodeImages(images(b"a")))
        assert failed.code() is Code.UNAVAILABLE and "shutting down" in failed.details()

    async def test_what_waits_at_close_is_unavailable(self):
        engine = FormulaEngine()
        engine.gate.clear()
        async with serving(engine) as (client, core):
            running = client.EncodeImages(images(b"a"))
            await until(lambda: core._room.items == 1 and core._pipeline._batcher.waiting == 0)
            waits = client.EncodeImages(images(b"b"))
            await until(lambda: core._pipeline._batcher.waiting == 1)
            closing = asyncio.create_task(core.close())
            failed = await failure(waits)
            engine.gate.set()
            await closing
            assert len((await running).results) == 1
        assert failed.code() is Code.UNAVAILABLE
        assert engine.closed


class TestDeadlines:
    async def test_past_before_it_begins(self):
        engine = FormulaEngine()
        async with serving(engine) as (client, _):
            failed = await failure(client.EncodeImages(images(b"a"), metadata=((DEADLINE, "0"),)))
        assert failed.code() is Code.DEADLINE_EXCEEDED
        assert engine.batches == [] and engine.counters["calls_past_deadline"] == 1

    async def test_past_while_the_device_is_busy(self):
        engine = FormulaEngine()
        engine.gate.clear()
        async with serving(engine) as (client, core):
            busy = client.EncodeImages(images(b"a"))
            await until(lambda: core._room.items == 1 and core._pipeline._batcher.waiting == 0)
            failed = await failure(client.EncodeImages(images(b"b"), metadata=((DEADLINE, "50"),)))
            engine.gate.set()
            await busy
            await client.EncodeImages(images(b"c"))
        assert failed.code() is Code.DEADLINE_EXCEEDED
        assert engine.batches == [1, 1]  # the late item never reached the device

    async def test_past_while_the_decoders_are_busy(self):
        engine = FormulaEngine()
        engine.decode_gate.clear()
        async with serving(engine) as (client, core):
            busy = client.EncodeImages(images(b"a"))
            await until(lambda: core._room.items == 1)
            failed = await failure(client.EncodeImages(images(b"b"), metadata=((DEADLINE, "50"),)))
            engine.decode_gate.set()
            await busy
        assert failed.code() is Code.DEADLINE_EXCEEDED
        assert (engine.decodes, engine.batches) == (1, [1])  # the late picture was not even decoded

    async def test_time_enough(self):
        async with serving(FormulaEngine()) as (client, _):
            answer = await client.EncodeImages(images(b"a"), metadata=((DEADLINE, "60000"),))
        assert answer.results[0].HasField("embedding")


class TestCancellation:
    async def test_a_cancelled_call_costs_no_device_time_and_leaves_no_room_taken(self):
        engine = FormulaEngine()
        engine.gate.clear()
        async with serving(engine) as (client, core):
            busy = client.EncodeImages(images(b"a"))
            await until(lambda: core._room.items == 1 and core._pipeline._batcher.waiting == 0)
            gone = client.EncodeImages(images(b"b", b"c"))
            await until(lambda: core._pipeline._batcher.waiting == 2)
            gone.cancel()
            await until(lambda: core._room.items == 1)
            engine.gate.set()
            await busy
            await client.EncodeImages(images(b"d"))
            await until(lambda: core._room.items == 0)
        assert engine.batches == [1, 1]
        assert engine.counters["calls_cancelled"] == 1


class TestModelsAndReport:
    async def test_list_and_get(self):
        async with serving(FormulaEngine("text")) as (client, _):
            (listed,) = (await client.ListModels(pb.ListModelsRequest())).models
            by_name = (await client.GetModel(pb.GetModelRequest(model="formula"))).model
            default = (await client.GetModel(pb.GetModelRequest())).model
            failed = await failure(client.GetModel(pb.GetModelRequest(model="other")))
        assert listed == by_name == default
        assert (listed.name, listed.revision, listed.family) == ("formula", "r1", "clip")
        (tower,) = listed.towers
        assert (tower.tower, tower.dimensions, tower.max_tokens) == (pb.TOWER_TEXT, DIMENSIONS, 8)
        assert (list(tower.pools), tower.fingerprint, tower.compute_dtype) == (["vision-cpu"], "f00d", "float32")
        assert tower.logit_scale == 12.5
        assert tower.preprocessing_json == '{"mode": "formula"}' and list(tower.mask_needs) == ["causal"]
        assert failed.code() is Code.NOT_FOUND

    async def test_report(self):
        async with serving(FormulaEngine()) as (client, _):
            await client.EncodeImages(images(b"bad"))
            answer = await client.GetBackendReport(pb.GetBackendReportRequest(pool="vision-cpu"))
            failed = await failure(client.GetBackendReport(pb.GetBackendReportRequest(pool="text")))
        (report,) = answer.replicas
        assert (report.pool, report.replica, report.node, report.host, report.pid) == (
            "vision-cpu", "r-1", "n-1", "h-1", 42,
        )  # fmt: skip
        assert (report.backend.name, report.backend.source, report.backend.fallback) == ("sdpa", "platform", "sdpa")
        assert [(r.name, r.reason) for r in report.backend.rejected] == [("fused", "no device")]
        assert list(report.backend.mask_needs) == ["causal"]
        assert list(report.backend.dtypes) == ["bfloat16", "float32"]
        assert (report.device.kind, report.device.memory_bytes) == ("cpu", 123456)
        assert [(s.name, s.milliseconds) for s in report.startup] == [("load", 1.5)]
        assert (report.counters["item_errors"], report.items_per_second) == (1, 7.0)
        assert list(report.notes) == ["a note"] and report.tower == pb.TOWER_VISION
        assert failed.code() is Code.NOT_FOUND
