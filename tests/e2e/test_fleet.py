"""A running fleet: the command line as a person types it, then two hundred requests at once.

One file, so that one fleet serves it all. In the storm a tenth of the pictures are broken, and each good picture gets
its own right vector.
"""

import asyncio
import json
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import psutil
import pyarrow.parquet
import pytest

from encoder.client import AsyncEncoderClient, EncoderClient, EncodeResult
from encoder.demo import demo_labels, demo_pictures
from tests.e2e.pictures import broken_pictures, expected_vectors, good_pictures

pytestmark = [pytest.mark.serve, pytest.mark.timeout(400)]
REQUESTS = 200
ZEROS = bytes(30 * 2**20)
# Requests that carry the 30 MB of zeros: enough to meet each other, few enough for a small machine.
WITH_ZEROS = (7, 60, 61, 133, 190)
MEMORY_SLACK = 350 * 2**20


def vitfleet(*arguments: object, code: int = 0) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [sys.executable, "-c", "from deployments.cli import main; main()", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stdout + done.stderr
    return done


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "pictures"
    (place / "deeper").mkdir(parents=True)
    for index, picture in enumerate(demo_pictures()):
        (place / ("deeper" if index % 2 else "") / picture.name).write_bytes(picture.read_bytes())
    (place / "notes.txt").write_text("no picture")
    return place


def unit(vectors: np.ndarray) -> np.ndarray:
    wide = vectors.astype(np.float64)
    return wide / np.linalg.norm(wide, axis=1, keepdims=True)


def test_encode_a_folder_to_npy(address: str, folder: Path, tmp_path: Path) -> None:
    done = vitfleet("encode", folder, "--out", tmp_path / "v.npy", "--address", address)
    assert "12 of 12 pictures" in done.stdout
    vectors, beside = np.load(tmp_path / "v.npy"), json.loads((tmp_path / "v.npy.json").read_text())
    expected = expected_vectors([Path(path).read_bytes() for path in beside["rows"]])
    assert vectors.shape == expected.shape and vectors.dtype == np.float32
    assert (unit(vectors) * expected).sum(axis=1).min() >= 0.999


def test_bad_pictures_are_listed_and_good_ones_kept(address: str, folder: Path, tmp_path: Path) -> None:
    (folder / "broken.jpg").write_bytes(broken_pictures()["truncated JPEG"])
    missing = tmp_path / "missing.png"
    done = vitfleet("encode", folder, missing, "--out", tmp_path / "v.parquet", "--address", address, code=1)
    assert "12 of 14 pictures" in done.stdout and "broken.jpg" in done.stderr and "missing.png" in done.stderr
    table = pyarrow.parquet.read_table(tmp_path / "v.parquet").to_pylist()
    failed = {Path(row["path"]).name for row in table if row["vector"] is None}
    assert failed == {"broken.jpg", "missing.png"} and all(row["error"] for row in table if row["vector"] is None)
    good = [row for row in table if row["vector"] is not None]
    expected = expected_vectors([Path(row["path"]).read_bytes() for row in good])
    assert (unit(np.array([row["vector"] for row in good])) * expected).sum(axis=1).min() >= 0.999


def test_int8_rows_carry_their_scales(address: str, folder: Path, tmp_path: Path) -> None:
    vitfleet("encode", folder, "--out", tmp_path / "v.npy", "--dtype", "int8", "--address", address)
    vectors, beside = np.load(tmp_path / "v.npy"), json.loads((tmp_path / "v.npy.json").read_text())
    restored = vectors * np.array(beside["scales"])[:, None]
    expected = expected_vectors([Path(path).read_bytes() for path in beside["rows"]])
    assert vectors.dtype == np.int8 and np.abs(restored - expected).max() <= 0.02


def test_classify_names_the_right_label(address: str) -> None:
    for picture, label in list(zip(demo_pictures(), demo_labels(), strict=True))[:3]:
        done = vitfleet("classify", picture, "--labels", label, "a black cross", "a white ring", "--address", address)
        first = next(line for line in done.stdout.splitlines() if "%" in line)
        assert label in first


def test_report_and_models(address: str) -> None:
    shown = vitfleet("report", "--address", address).stdout
    assert "vision-cpu" in shown and "sdpa" in shown and "platform" in shown
    report = json.loads(vitfleet("report", "--json", "--address", address).stdout)
    assert {replica["pool"] for replica in report["replicas"]} == {"vision-cpu", "text"}
    assert all(check["passed"] for replica in report["replicas"] for check in replica["self_checks"])
    assert "demo" in vitfleet("models", "--address", address).stdout
    models = json.loads(vitfleet("models", "--json", "--address", address).stdout)["models"]
    assert {tower["tower"] for tower in models[0]["towers"]} == {"TOWER_VISION", "TOWER_TEXT"}
    assert all(tower["logit_scale"] > 1 for tower in models[0]["towers"])


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("encode", "/no/such/folder/x", "--out", "v.txt"), ".npy or .parquet"),
        (("encode", "x.png", "--out", "/no/such/place/v.npy"), "does not exist"),
        (("report", "--address", "127.0.0.1:1"), "vitfleet serve"),
        (("classify", "x.png", "--labels", "only one"), "two labels"),
        (("check", "--model", "/no/such/model"), "no such folder"),
        (("check", "--attention-backend", "flashy"), "unknown"),
        (("check", "--attention-backend", "ascend_attn"), "cannot run on cpu"),
        (("check", "--device", "cuda"), "cuda"),
        (("check", "--dtype", "int3"), "dtype"),
        (("serve", "--config", "/no/such/config.yaml", "--port", "0"), "cannot be read"),
    ],
)
def test_errors_are_one_line_with_the_next_step(arguments: tuple[str, ...], said: str) -> None:
    done = vitfleet(*arguments, code=1)
    assert said in done.stderr.splitlines()[-1] and done.stderr.splitlines()[-1].startswith("error: ")


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
