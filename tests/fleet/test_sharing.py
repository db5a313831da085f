"""A router over a whole fleet of fake pools: who gets which calls, and who gets none. No Serve is started."""

import asyncio
from collections import Counter

import grpc
import numpy as np
import pytest

from encoder.v1 import encoder_pb2 as pb
from tests.router.fake_pool import FakePool
from tests.router.harness import Fleet, eventually, failure_of, fleet, images, texts

Code = grpc.StatusCode
MASKS = ("none", "causal", "key_padding")


def mixed() -> list[FakePool]:
    """A GPU, an NPU and a CPU pool for pictures; a CPU pool for texts, and an NPU pool that takes no mask of theirs."""
    return [
        FakePool("vision-gpu", backend_masks=MASKS, replicas=2, items_per_second=400.0),
        FakePool("vision-npu", backend_masks=["none"], replicas=2, items_per_second=200.0),
        FakePool("vision-cpu", backend_masks=MASKS, items_per_second=50.0),
        FakePool("text", tower="text", mask_needs=MASKS, backend_masks=MASKS, items_per_second=50.0),
        FakePool("text-npu", tower="text", mask_needs=MASKS, backend_masks=["none"], items_per_second=5000.0),
    ]


async def send(started: Fleet, calls: int) -> None:
    """`calls` calls with pictures and as many with texts, all at once; fails when one of them does."""
    await asyncio.gather(
        *(started.stub.EncodeImages(images(f"p{i}".encode()), timeout=30) for i in range(calls)),
        *(started.stub.EncodeText(texts(f"t{i}"), timeout=30) for i in range(calls)),
    )


@pytest.mark.parametrize("masks", ["prefer", "require"])
async def test_texts_land_in_the_pool_that_takes_their_masks(masks: str) -> None:
    pools = mixed()
    async with fleet(*pools, masks=masks) as started:
        await eventually(lambda: all(started.state(pool.name).reports for pool in pools))
        await send(started, 100)
    seen = {pool.name: Counter(call.method for call in pool.requests) for pool in pools}
    assert seen["text"] == {"EncodeText": 100}
    # However fast it says it is: no masked call reaches the pool that declares no mask.
    assert seen["text-npu"] == {}
    vision = seen["vision-gpu"] + seen["vision-npu"] + seen["vision-cpu"]
    assert vision == {"EncodeImages": 100}


async def test_a_pin_holds_under_load() -> None:
    pools = mixed()
    by_name = {pool.name: pool for pool in pools}
    pinned = ["vision-cpu", "vision-npu", "vision-gpu"]
    async with fleet(*pools) as started:
        calls = [
            started.stub.EncodeImages(images(f"{name} {i}".encode(), pool=name), timeout=30)
            for i in range(50)
            for name in pinned
        ]
        answers = await asyncio.gather(*calls)
        assert [answer.provenance.pool for answer in answers] == pinned * 50
        # A pin to a pool of the other tower is refused, not moved.
        refused = await failure_of(started.stub.EncodeText(texts("t", pool="vision-cpu"), timeout=10))
        assert refused.code() is Code.FAILED_PRECONDITION
        # A pin to a pool that cannot answer is no reason to ask another.
        await started.servers["vision-npu"].stop()
        lost = await failure_of(started.stub.EncodeImages(images(b"p", pool="vision-npu"), timeout=5))
        assert lost.code() in (Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED)
    for name in pinned:
        assert {pb.EncodeImagesRequest.FromString(call.request).options.pool for call in by_name[name].requests} == {
            name
        }


async def test_a_pool_in_quarantine_gets_nothing() -> None:
    pools = mixed()
    pools[1].cosine = 0.5
    async with fleet(*pools) as started:
        await eventually(lambda: bool(started.state("vision-npu").quarantine))
        await send(started, 100)
        refused = await failure_of(started.stub.EncodeImages(images(b"p", pool="vision-npu"), timeout=10))
        assert refused.code() is Code.FAILED_PRECONDITION and "quarantine" in refused.details()
    assert pools[1].requests == [] and pools[1].goldens
    assert len(pools[0].requests) + len(pools[2].requests) == 100


async def latencies(started: Fleet, callers: int, calls: int) -> list[float]:
    """Seconds of each of `calls` calls of `callers` that send one after the other."""
    loop = asyncio.get_running_loop()
    left, seconds = iter(range(calls)), []

    async def send() -> None:
        for number in left:
            before = loop.time()
            await started.stub.EncodeImages(images(f"p{number}".encode()), timeout=60)
            seconds.append(loop.time() - before)

    await asyncio.gather(*(send() for _ in range(callers)))
    return seconds


async def test_pools_of_speed_1_and_4_share_load_as_1_to_4_and_the_slow_one_makes_no_tail() -> None:
    # Enough callers that no pool runs out of work: the proportion is set by the pools, not by the machine.
    fast_s, callers, calls = 0.04, 20, 300
    alone = FakePool("vision-fast", forward_s=fast_s)
    async with fleet(alone) as started:
        alone_s = await latencies(started, callers, calls // 2)
    slow, fast = FakePool("vision-slow", forward_s=4 * fast_s), FakePool("vision-fast", forward_s=fast_s)
    async with fleet(slow, fast) as started:
        await latencies(started, callers, 150)  # until the speeds are measured
        before = len(slow.requests), len(fast.requests)
        both_s = await latencies(started, callers, calls)
    share = (len(slow.requests) - before[0]) / (len(fast.requests) - before[1])
    assert 0.25 * 0.85 <= share <= 0.25 * 1.15
    assert np.quantile(both_s, 0.99) < 2 * np.quantile(alone_s, 0.99)
