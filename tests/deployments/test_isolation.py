"""A replica whose decoder crashes or hangs: that item fails, its neighbours get their vectors, the replica stays."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import numpy as np
import psutil
import pytest

from deployments.service import EncoderCore
from deployments.settings import parse_pool_settings
from encoder.engine import Engine
from encoder.preprocess import workers
from encoder.settings import parse_engine_settings
from encoder.v1 import encoder_pb2 as pb
from tests.deployments.plain_server import IDENTITY, images
from tests.preprocess.pictures import file_of, photo

QUICK = {"runner": "eager", "buckets": [1, 4], "threads": 1, "self_check": False, "dtype": "float32"}
JPEG, WEBP, BMP = (file_of(photo(50, 70, seed=n), name) for n, name in enumerate(("JPEG", "WEBP", "BMP")))


def load(**decode: object) -> Engine:
    return Engine.load(parse_engine_settings({"model": "demo", "tower": "vision", **QUICK, "decode": decode}))


@pytest.fixture(scope="module")
def expected() -> Iterator[dict[bytes, np.ndarray]]:
    """Vectors by an engine that decodes on threads alone."""
    engine = load(isolation="thread")
    yield {data: engine.forward([engine.prepare_image(data)]).vectors[0] for data in (JPEG, WEBP, BMP)}
    engine.close()


@asynccontextmanager
async def replica(engine: Engine) -> AsyncIterator[EncoderCore]:
    core = EncoderCore(engine, parse_pool_settings({"name": "vision-cpu", "engine": {}, "decode_threads": 3}), IDENTITY)
    try:
        yield core
    finally:
        await core.close()


def check(result: pb.ImageResult, vector: np.ndarray) -> None:
    found = np.frombuffer(result.embedding.values, "<f4")
    np.testing.assert_allclose(found, vector / np.linalg.norm(vector), atol=1e-5)


@pytest.mark.parametrize("isolation", ["auto", "process"])
async def test_crashes_and_hangs_cost_their_own_items(
    monkeypatch: pytest.MonkeyPatch, expected: dict[bytes, np.ndarray], isolation: str
) -> None:
    monkeypatch.setattr(workers, "WORKER_MODULE", "tests.preprocess.misbehaving_worker")
    engine = load(isolation=isolation, time_limit_s=1.0)
    engine.start_decoders(3)
    before = engine._decoder.worker_pids
    async with replica(engine) as core:
        request = images(JPEG, BMP + b"SLEEP", WEBP, BMP + b"CRASH", BMP, BMP + b"LEAVE", b"not a picture", JPEG)
        answer = await core.encode_images(request)
        again = await core.encode_images(images(WEBP, BMP, JPEG))
        await core.check_health()
        pids = engine._decoder.worker_pids
        report = core.get_backend_report(pb.GetBackendReportRequest()).replicas[0]
    for place, data in ((0, JPEG), (2, WEBP), (4, BMP), (7, JPEG)):
        check(answer.results[place], expected[data])
    for result, data in zip(again.results, (WEBP, BMP, JPEG), strict=True):
        check(result, expected[data])
    errors = {place: (answer.results[place].error.code, answer.results[place].error.message) for place in (1, 3, 5, 6)}
    assert errors[1][0] == 3 and "took longer than 1 s" in errors[1][1]
    assert errors[3][0] == 3 and "crashed its decoder" in errors[3][1]
    assert errors[5][0] == 13 and "ended with exit status 7" in errors[5][1]
    assert errors[6][0] == 3 and "not a supported picture" in errors[6][1]
    assert report.counters["decode_workers_lost"] == 3 and report.counters["item_errors"] == 4
    assert len(before) == 3 and len(set(before) - set(pids)) >= 1
    assert not any(psutil.pid_exists(pid) for pid in {*before, *pids})


async def test_a_worker_killed_while_it_decodes(
    monkeypatch: pytest.MonkeyPatch, expected: dict[bytes, np.ndarray]
) -> None:
    monkeypatch.setattr(workers, "WORKER_MODULE", "tests.preprocess.misbehaving_worker")
    engine = load(isolation="auto", time_limit_s=60.0)
    async with replica(engine) as core:
        under_way = asyncio.create_task(core.encode_images(images(JPEG, BMP + b"SLEEP", WEBP)))
        async with asyncio.timeout(30):
            while not (asleep := [pid for pid in engine._decoder.worker_pids if _sleeps(pid)]):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        neighbour = await core.encode_images(images(BMP, JPEG))
        os.kill(asleep[0], signal.SIGKILL)
        answer = await under_way
        after = await core.encode_images(images(BMP))
        assert core._room.items == 0
    check(neighbour.results[0], expected[BMP])
    check(neighbour.results[1], expected[JPEG])
    check(answer.results[0], expected[JPEG])
    check(answer.results[2], expected[WEBP])
    check(after.results[0], expected[BMP])
    assert answer.results[1].error.code == 13 and "ended by signal 9" in answer.results[1].error.message


async def test_a_deadline_does_not_wait_for_a_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "WORKER_MODULE", "tests.preprocess.misbehaving_worker")
    engine = load(isolation="auto", time_limit_s=60.0)
    async with replica(engine) as core:
        deadline = asyncio.get_running_loop().time() + 0.5
        with pytest.raises(Exception, match="deadline"):
            await core.encode_images(images(BMP + b"SLEEP"), deadline)
        answer = await core.encode_images(images(JPEG))
        pids = engine._decoder.worker_pids
    assert answer.results[0].HasField("embedding")
    assert pids and not any(psutil.pid_exists(pid) for pid in pids)


def _sleeps(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip() == "asleep"
    except OSError:
        return False
