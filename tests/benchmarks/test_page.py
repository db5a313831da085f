"""The page and its plots from documents by formula."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from benchmarks import page
from benchmarks.journey import journey
from benchmarks.thresholds import THRESHOLDS, judge

from .documents import documents

PLOTS = {"engine", "preprocess", "serve", "peers", "growth", "memory", "start"}


def write(folder: Path, found: dict[str, dict[str, Any]]) -> str:
    for name, document in found.items():
        (folder / f"{name}.json").write_text(json.dumps(document))
    return page.write(folder).read_text()


def test_every_threshold_is_judged_by_its_own_figure() -> None:
    judged = {one.what: (one.measured, one.passed) for one in judge(documents())}
    assert judged == {
        "engine bf16, batch 32, of the matrix rate": ("0.90", False),
        "engine bf16, batch 1, of the matrix rate": ("0.90", True),
        "engine int8 over bf16, batch 32": ("1.80×", True),
        "worst cosine of int8 to fp32 in its self-check": ("0.9987", True),
        "service bf16, 32 clients × 1, over the bare engine": ("0.93", True),
        "service p50, one client, less the bare batch-1 forward": ("7.50 ms", False),
        "images/s, bf16 over infinity at its best": ("2.53×", True),
        "p50 of one client, bf16 over infinity at its best": (None, None),
        "images/s, int8 over infinity at its best": (None, None),
        "texts/s over infinity at its best": (None, None),
        "images/s, bf16 over infinity without int8": (None, None),
        "p50 of one client, bf16 over infinity without int8": ("0.30×", True),
        "images/s, int8 over infinity without int8": (None, None),
        "texts/s over infinity without int8": (None, None),
        "preprocessing `torch` over Pillow + transformers' PIL processor": ("4.25×", True),
        "resident memory of the vision replica with its decode workers": ("720 MB", True),
        "drift of that memory while 10,000 pictures are served": ("2.70 %", False),
        "replica ready, converted models kept": ("9.00 s", True),
        "router's addition to p50, one client": ("1.20 ms", True),
        "requests of 100 KB through the router": (None, None),
    }
    assert len(judged) == len(THRESHOLDS)


def test_drift_over_fewer_pictures_and_figures_of_another_model_are_not_judged() -> None:
    found = documents()
    found["growth"]["figures"]["pictures"] = 9_999.0
    found["serve"]["model"] = "demo"
    judged = {one.what: one.passed for one in judge(found)}
    assert judged["drift of that memory while 10,000 pictures are served"] is None
    assert judged["resident memory of the vision replica with its decode workers"] is True
    assert judged["service bf16, 32 clients × 1, over the bare engine"] is None


def test_where_a_requests_time_goes_adds_up_to_its_latency() -> None:
    document = documents()["serve"]
    spent = journey(document)
    assert [row["ms"] for row in spent] == [4.0, 0.5, 22.0, 0.25, 1.25, 3.0]  # 28 in the replica of 31 in all
    assert sum(row["ms"] for row in spent) == 31.0
    assert [row["share"] for row in spent] == ["13%", "2%", "71%", "1%", "4%", "10%"]
    assert journey(document, load="32 clients × 1") == []  # not measured
    assert journey({"rows": [row for row in document["rows"] if row["way"] == "direct"]}) == []


def test_page_shows_tables_outcomes_and_what_was_left_out(tmp_path: Path) -> None:
    text = write(tmp_path, documents())
    assert "11 of 20" not in text and "10 of 20 hold." in text
    assert (
        "| service p50, one client, less the bare batch-1 forward | ≤ 6 ms | 7.50 ms | **missed** | `serve` |" in text
    )
    assert "| texts/s over infinity at its best | ≥ 2× | - | not measured | `peers` |" in text
    assert "| vision int8 openvino | 32 | 72.0 | 0.900 | 0.999 |" in text
    assert "## Where a request's time goes\n\n1 client × 1:\n\n| where | ms | share |" in text
    left_out = text.split("## What was not run")[1].split("##")[0].strip().splitlines()
    assert left_out == [
        "- `ceiling` has no result",
        "- `router` ended early, its figures are a part: ended, not done after 9 s",
        "- clip-as-service: not measured: it needs a thing",
        "- transformers: left out of this run",
        "- sentence-transformers: left out of this run",
    ]
    assert "2 cores of A processor (avx2); Python 3.11.0, torch 2.13.0." in text
    # A column without a value in any row is not shown.
    assert "texts/s |" not in text.split("## Peers")[1].split("##")[0]


def test_plots_are_drawn_and_shown(tmp_path: Path) -> None:
    text = write(tmp_path, documents())
    assert {path.stem for path in tmp_path.glob("*.png")} == PLOTS
    for name in PLOTS:
        assert f"![{name}]({name}.png)" in text
        pixels = np.asarray(Image.open(tmp_path / f"{name}.png").convert("RGB"))
        assert len(np.unique(pixels.reshape(-1, 3), axis=0)) > 20


def test_a_plot_that_cannot_be_drawn_costs_no_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = documents()
    del found["serve"]["rows"][0]["p50 ms"]
    text = write(tmp_path, found)
    assert {path.stem for path in tmp_path.glob("*.png")} == PLOTS - {"serve"}
    assert "serve.png" not in text and "engine.png" in text
    assert "no plot serve: KeyError" in capsys.readouterr().err


def test_a_folder_without_results_gives_a_page_that_says_so(tmp_path: Path) -> None:
    text = page.write(tmp_path / "new").read_text()
    assert "There is no result yet." in text
    assert "0 of 20 hold." in text


def test_pages_of_other_machines_are_linked(tmp_path: Path) -> None:
    assert "Other machines" not in write(tmp_path, documents())
    other = tmp_path / "elsewhere"
    other.mkdir()
    write(other, documents())
    (tmp_path / "empty").mkdir()
    text = page.write(tmp_path).read_text()
    section = text.split("## Other machines")[1].split("##")[0].strip()
    told = page.machine(documents()["engine"])
    assert section == f"- [elsewhere](elsewhere/README.md): {told}"
