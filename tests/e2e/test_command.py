"""The command line against a running fleet, as a person types it."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest

from encoder.demo import demo_labels, demo_pictures
from tests.e2e.pictures import broken_pictures, expected_vectors

pytestmark = [pytest.mark.serve, pytest.mark.timeout(300)]


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
