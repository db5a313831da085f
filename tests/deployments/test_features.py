"""Patch features over plain gRPC: what is answered, what is refused, what shares a forward, how large an answer is."""

import asyncio

import grpc
import numpy as np
import pytest

from encoder.v1 import encoder_pb2 as pb
from tests.deployments.formula import GRID, TOKEN_DIMENSIONS, FormulaEngine, features_of, seed_of, vector_of
from tests.deployments.plain_server import images, serving
from tests.deployments.test_service import failure, floats, unit, until
from tests.deployments.test_stream import answers, item

Code = grpc.StatusCode
TOKENS = {"output": pb.OUTPUT_KIND_TOKENS}
# One picture's features in an answer: 6 patches of 5 float32, and what is reckoned for their framing.
ONE = 6 * 5 * 4 + 64


def numbers(features: pb.Features) -> np.ndarray:
    item = "<f2" if features.dtype == pb.EMBEDDING_DTYPE_FLOAT16 else "<f4"
    return np.frombuffer(features.values, item).reshape(features.tokens, features.dimensions)


async def test_each_image_gets_its_own_features_and_their_grid() -> None:
    sources = [b"a", b"bb", b"ccc", b"dd", b"e", b"f"]
    async with serving(FormulaEngine()) as (client, _):
        answer = await client.EncodeImages(images(*sources, **TOKENS))
    assert [result.WhichOneof("outcome") for result in answer.results] == ["features"] * 6
    for source, result in zip(sources, answer.results, strict=True):
        assert (result.features.dtype, tuple(result.features.grid)) == (pb.EMBEDDING_DTYPE_FLOAT32, GRID)
        assert np.array_equal(numbers(result.features), features_of(seed_of(source)))
    assert answer.timings.forward_ms > 0 and answer.timings.preprocess_ms > 0


async def test_float16() -> None:
    async with serving(FormulaEngine()) as (client, _):
        answer = await client.EncodeImages(images(b"x", dtype=pb.EMBEDDING_DTYPE_FLOAT16, **TOKENS))
    features = answer.results[0].features
    assert len(features.values) == 2 * 6 * TOKEN_DIMENSIONS
    assert np.array_equal(numbers(features), features_of(seed_of(b"x")).astype(np.float16))


async def test_an_item_that_fails_is_answered_beside_its_neighbours() -> None:
    engine = FormulaEngine()
    async with serving(engine) as (client, _):
        answer = await client.EncodeImages(images(b"ok1", b"bad", b"poison", b"nan", b"ok2", **TOKENS))
        pooled = await client.EncodeImages(images(b"nan", b"ok1"))
    kinds = [result.WhichOneof("outcome") for result in answer.results]
    assert kinds == ["features", "error", "error", "error", "features"]
    assert [result.error.code for result in answer.results] == [0, 3, 13, 13, 0]
    assert "NaN or infinity" in answer.results[3].error.message
    assert np.array_equal(numbers(answer.results[4].features), features_of(seed_of(b"ok2")))
    assert [result.WhichOneof("outcome") for result in pooled.results] == ["error", "embedding"]
    assert pooled.results[0].error.code == 13
    assert (engine.counters["item_errors"], engine.counters["non_finite"]) == (4, 2)


async def test_one_who_wants_features_and_one_who_does_not_share_a_forward() -> None:
    engine = FormulaEngine()
    engine.gate.clear()
    async with serving(engine, decode_threads=4) as (client, core):
        first = client.EncodeImages(images(b"first"))
        await until(lambda: core._room.items == 1 and core._pipeline._batcher.waiting == 0)
        calls = [client.EncodeImages(images(b"a")), client.EncodeImages(images(b"b", **TOKENS))]
        await until(lambda: core._pipeline._batcher.waiting == 2)
        engine.gate.set()
        pooled, features = await asyncio.gather(*calls)
        await first
        await client.EncodeImages(images(b"last"))
    assert (engine.batches, engine.read_back) == ([1, 2, 1], [0, 2, 0])
    np.testing.assert_allclose(floats(pooled.results[0].embedding), unit(vector_of(seed_of(b"a"))), rtol=1e-6)
    assert np.array_equal(numbers(features.results[0].features), features_of(seed_of(b"b")))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"dtype": pb.EMBEDDING_DTYPE_INT8}, "not quantised"),
        ({"dtype": pb.EMBEDDING_DTYPE_BINARY}, "not quantised"),
        ({"dimensions": 3}, "not truncated"),
        ({"normalize": True}, "are raw"),
    ],
)
async def test_what_features_cannot_be(options: dict[str, object], words: str) -> None:
    engine = FormulaEngine()
    async with serving(engine) as (client, _):
        failed = await failure(client.EncodeImages(images(b"x", **TOKENS, **options)))
        plain = await client.EncodeImages(images(b"x", normalize=False, **TOKENS))
    assert failed.code() is Code.INVALID_ARGUMENT and words in failed.details()
    assert plain.results[0].HasField("features") and engine.batches == [1]


async def test_a_kind_of_another_version_is_refused() -> None:
    async with serving(FormulaEngine()) as (client, _):
        failed = await failure(client.EncodeImages(images(b"x", output=9)))
    assert failed.code() is Code.INVALID_ARGUMENT and "output kind 9" in failed.details()


async def test_a_tower_that_gives_none_says_so() -> None:
    async with serving(FormulaEngine(token_dimensions=0)) as (client, _):
        vision = await failure(client.EncodeImages(images(b"x", **TOKENS)))
        (tower,) = (await client.GetModel(pb.GetModelRequest())).model.towers
    assert (list(tower.output_kinds), tower.token_dimensions) == ([pb.OUTPUT_KIND_POOLED], 0)
    async with serving(FormulaEngine("text")) as (client, _):
        text = await failure(client.EncodeText(pb.EncodeTextRequest(texts=["a"], options=pb.EncodeOptions(**TOKENS))))
    assert vision.code() is text.code() is Code.FAILED_PRECONDITION
    assert "the vision tower gives no patch features" in vision.details()
    assert "the text tower gives no patch features" in text.details()


async def test_the_model_says_what_its_features_are() -> None:
    async with serving(FormulaEngine()) as (client, _):
        (tower,) = (await client.GetModel(pb.GetModelRequest())).model.towers
    assert list(tower.output_kinds) == [pb.OUTPUT_KIND_POOLED, pb.OUTPUT_KIND_TOKENS]
    assert (tower.token_dimensions, tower.token_features) == (TOKEN_DIMENSIONS, "by formula")


async def test_an_answer_that_would_not_fit_is_refused_before_anything_is_computed() -> None:
    engine = FormulaEngine()
    limit = 4096 + 30 * ONE
    async with serving(engine, max_response_bytes=limit) as (client, core):
        failed = await failure(client.EncodeImages(images(*[b"x"] * 31, **TOKENS)))
        assert engine.batches == []
        fits = await client.EncodeImages(images(*[b"x"] * 30, **TOKENS))
        pooled = await client.EncodeImages(images(*[b"x"] * 31))
        assert (core._room.items, core._room.bytes) == (0, 0)
    assert failed.code() is Code.INVALID_ARGUMENT
    assert f"31 images are {31 * ONE} bytes and an answer holds {limit}" in failed.details()
    assert "at most 30 of this size fit" in failed.details() and "float16" in failed.details()
    assert fits.ByteSize() <= limit and len(fits.results) == 30
    assert len(pooled.results) == 31


async def test_pictures_that_cannot_be_read_take_no_room_in_the_answer() -> None:
    async with serving(FormulaEngine(), max_response_bytes=8192) as (client, _):
        answer = await client.EncodeImages(images(*[b"bad"] * 30, b"x", **TOKENS))
    assert [result.HasField("features") for result in answer.results] == [False] * 30 + [True]


async def test_answers_that_are_held_count_as_load() -> None:
    engine = FormulaEngine()
    engine.gate.clear()
    async with serving(engine, max_waiting_bytes=10 * ONE, max_request_bytes=1024) as (client, core):
        first = client.EncodeImages(images(*[b"a"] * 8, **TOKENS))
        await until(lambda: core._room.bytes > 8 * ONE)
        failed = await failure(client.EncodeImages(images(b"b", b"b", **TOKENS)))
        engine.gate.set()
        assert len((await first).results) == 8
        # More than there is room for gets through when it is alone.
        assert len((await client.EncodeImages(images(*[b"b"] * 20, **TOKENS))).results) == 20
        assert core._room.bytes == 0
    assert failed.code() is Code.RESOURCE_EXHAUSTED and f"an answer of {2 * ONE} does not fit" in failed.details()
    assert engine.counters["calls_overloaded"] == 1


async def test_stream() -> None:
    engine = FormulaEngine()
    requests = [item(f"n{i}", **(TOKENS if i % 2 else {})) for i in range(20)]
    requests.append(item("int8", dtype=pb.EMBEDDING_DTYPE_INT8, **TOKENS))
    requests.append(pb.EncodeStreamRequest(id="text", text="a", options=pb.EncodeOptions(**TOKENS)))
    async with serving(engine) as (client, _):
        found = await answers(client.EncodeStream(iter(requests)))
    for i in range(20):
        name = f"n{i}"
        if i % 2:
            assert np.array_equal(numbers(found[name].features), features_of(seed_of(name.encode())))
        else:
            np.testing.assert_allclose(
                floats(found[name].embedding), unit(vector_of(seed_of(name.encode()))), rtol=1e-6
            )
    assert found["int8"].error.code == 3 and found["text"].error.code == 9


async def test_a_streamed_picture_whose_features_fit_no_answer_fails_alone() -> None:
    engine = FormulaEngine()
    engine.grid_of = lambda _: (64, 64)  # type: ignore[method-assign]
    async with serving(engine, max_response_bytes=8192) as (client, _):
        found = await answers(client.EncodeStream(iter([item("large", **TOKENS), item("good")])))
    assert found["large"].error.code == 3 and "not even one fits" in found["large"].error.message
    assert found["good"].HasField("embedding")
