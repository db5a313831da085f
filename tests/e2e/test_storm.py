"""Two hundred requests at once, a tenth of their pictures broken: each good picture gets its own right vector."""

import asyncio
import random
import time
from collections.abc import Iterator

import numpy as np
import psutil
import pytest

from encoder.client import AsyncEncoderClient, EncoderClient, EncodeResult
from tests.e2e.pictures import broken_pictures, expected_vectors, good_pictures

pytestmark = [pytest.mark.serve, pytest.mark.timeout(400)]
REQUESTS = 200
ZEROS = bytes(30 * 2**20)
# Requests that carry the 30 MB of zeros: enough to meet each other, few enough for a small machine.
WITH_ZEROS = (7, 60, 61, 133, 190)
MEMORY_SLACK = 350 * 2**20


@pytest.fixture(scope="module")
def replica(address: str) -> psutil.Process:
    with EncoderClient(address) as client:
        return psutil.Process(client.backend_report("vision-cpu").replicas[0].pid)


def plan(seed: int, good: list[bytes], broken: list[bytes]) -> Iterator[tuple[list[bytes], list[int | None]]]:
    """Requests: their pictures, and for each the index of the good picture it is, or None."""
    dice = random.Random(seed)
    for request in range(REQUESTS):
        chosen: list[int | None] = []
        pictures: list[bytes] = []
        for _ in range(dice.randint(1, 40)):
            if dice.random() < 0.1:
                chosen.append(None)
                pictures.append(dice.choice(broken))
            else:
                chosen.append(dice.randrange(len(good)))
                pictures.append(good[chosen[-1] or 0])
        if request in WITH_ZEROS:
            chosen.append(None)
            pictures.append(ZEROS)
        yield pictures, chosen


async def storm(
    address: str, requests: list[tuple[list[bytes], list[int | None]]]
) -> tuple[list[EncodeResult], list[bool]]:
    """The answers, and what the health service said meanwhile."""
    healthy: list[bool] = []

    async def watch(client: AsyncEncoderClient) -> None:
        while True:
            healthy.append(await client.healthy(timeout=10))
            await asyncio.sleep(0.5)

    async with AsyncEncoderClient(address, batch_size=64, timeout=300, retries=50) as client:
        watching = asyncio.create_task(watch(client))
        answers = await asyncio.gather(*(client.encode_images(pictures, on_error="mask") for pictures, _ in requests))
        watching.cancel()
    return list(answers), healthy


def test_every_good_picture_gets_its_vector_and_every_bad_one_its_error(address: str, replica: psutil.Process) -> None:
    good, broken = good_pictures(), list(broken_pictures().values())
    expected = expected_vectors(good)
    likeness = expected @ expected.T - np.eye(len(good))
    assert likeness.max() < 0.99999, "two pictures are too alike to be told apart"
    before = replica.memory_info().rss
    for seed in (1, 2):
        requests = list(plan(seed, good, broken))
        answers, healthy = asyncio.run(storm(address, requests))
        assert healthy and all(healthy)
        for (pictures, chosen), answer in zip(requests, answers, strict=True):
            assert len(answer) == len(pictures)
            for row, index in enumerate(chosen):
                if index is None:
                    error = answer.errors[row]
                    assert error.code == "INVALID_ARGUMENT" and len(error.message) > 10
                else:
                    assert answer.ok[row], answer.errors.get(row)
                    cosine = float(answer.vectors[row].astype(np.float64) @ expected[index])
                    assert cosine >= 0.999, (index, cosine)
            assert len(set(answer.fingerprints)) == 1
    assert memory_comes_back(replica, before + MEMORY_SLACK)


def memory_comes_back(process: psutil.Process, limit: int) -> bool:
    """Within a few health checks, each of which gives freed memory back, the resident size is below the limit."""
    for _ in range(90):
        if process.memory_info().rss <= limit:
            return True
        time.sleep(0.5)
    return False


def test_each_kind_of_broken_picture_is_told_what_it_is(address: str) -> None:
    broken = broken_pictures() | {"30 MB of zeros": ZEROS}
    with EncoderClient(address, retries=5) as client:
        answer = client.encode_images(list(broken.values()), on_error="mask")
    assert not answer.ok.any()
    said = {kind: answer.errors[row].message for row, kind in enumerate(broken)}
    assert all(answer.errors[row].code == "INVALID_ARGUMENT" for row in range(len(broken)))
    assert "empty" in said["empty"] or "no bytes" in said["empty"]
    assert "60000" in said["60000x60000"]
    assert all("Traceback" not in message and "\n" not in message for message in said.values())
