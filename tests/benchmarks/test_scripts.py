"""Every benchmark imports and tells its options; rates and runs without a service."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

import benchmarks
from benchmarks import serve, start
from benchmarks.__main__ import ALL, PEER_STEP, Step, remember, run
from benchmarks.fleet import VISION
from benchmarks.load import Ledger, Plan, row_of, slope
from benchmarks.peers import figures_of
from benchmarks.results import keep
from deployments.events import FleetEvent
from encoder.v1 import encoder_pb2 as pb

SCRIPTS = sorted(
    path.stem for path in Path(benchmarks.__file__).parent.glob("*.py") if "def main()" in path.read_text()
)


def test_each_step_is_a_script() -> None:
    assert {step.name for step in (*ALL, PEER_STEP)} <= set(SCRIPTS)


@pytest.mark.parametrize("name", SCRIPTS)
def test_help(name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    module = __import__(f"benchmarks.{name}", fromlist=["main"])
    monkeypatch.setattr(sys, "argv", [name, "--help"])
    with pytest.raises(SystemExit) as ended:
        module.main()
    assert ended.value.code == 0
    assert " ".join((module.__doc__ or "").split())[:40] in " ".join(capsys.readouterr().out.split())


def test_slope_of_bursts_is_their_mean_rate() -> None:
    # 32 answers every 0.8 s: 40 a second, though 13 bursts lie within 12 intervals.
    at = [0.8 * burst for burst in range(13) for _ in range(32)]
    assert slope(at, [1] * len(at)) == pytest.approx(40.0, rel=0.02)


def test_rate_of_few_answers_is_by_their_latency() -> None:
    ledger = Ledger()
    ledger.at, ledger.latency, ledger.items = [3.0, 9.0], [6.0, 6.0], [256, 256]
    row = row_of(Plan("two", "", items=256), ledger, 10.0, {"client": 0.1})
    assert row["items/s"] == pytest.approx(256 / 6.0)
    assert row["p50 ms"] == pytest.approx(6000.0)


def test_rate_of_a_single_burst_is_by_its_latency() -> None:
    """Of a peer that compiles for 29 s and then answers 32 clients within 5 ms, 6000 a second were told."""
    ledger = Ledger()
    ledger.at, ledger.latency, ledger.items = list(np.linspace(29.0, 29.005, 32)), [29.5] * 32, [1] * 32
    row = row_of(Plan("burst", "", clients=32), ledger, 30.0, {})
    assert row["items/s"] == pytest.approx(32 / 29.5)


def test_no_answer_is_null_in_json(tmp_path: Path) -> None:
    row = row_of(Plan("none", ""), Ledger(), 10.0, {})
    path = keep("none", "None", [row], folder=tmp_path)
    assert json.loads(path.read_text())["rows"][0]["p50 ms"] is None


def test_peers_are_compared_by_their_best_setting() -> None:
    rows = [
        {"who": "infinity", "setting": "a", "images/s": 12.0, "p50 ms": 90.0, "texts/s": 50.0},
        {"who": "infinity", "setting": "b", "images/s": 16.0, "p50 ms": 120.0, "texts/s": None},
        {"who": "infinity", "setting": "c", "images/s": float("nan"), "p50 ms": None, "texts/s": float("nan")},
        {"who": "infinity", "setting": "int8, d", "images/s": 32.0, "p50 ms": 54.0, "texts/s": 40.0},
        {"who": "vitfleet", "setting": "bf16", "images/s": 40.0, "p50 ms": 27.0, "texts/s": 200.0},
        {"who": "vitfleet", "setting": "int8", "images/s": 72.0, "p50 ms": 15.0, "texts/s": None},
    ]
    figures = figures_of(rows)
    assert figures["vitfleet bf16 over infinity images/s"] == 1.25
    assert figures["vitfleet bf16 over infinity p50 ms"] == pytest.approx(0.5)
    assert figures["vitfleet bf16 over infinity texts/s"] == 4.0
    assert figures["vitfleet int8 over infinity images/s"] == 2.25
    assert figures["vitfleet bf16 over infinity in floats images/s"] == 2.5
    assert figures["vitfleet bf16 over infinity in floats p50 ms"] == pytest.approx(0.3)
    assert figures["vitfleet int8 over infinity in floats images/s"] == 4.5
    assert "vitfleet int8 over infinity texts/s" not in figures


def test_a_step_that_fails_is_told_and_leaves_no_older_figures(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text("{}")
    outcome = run(Step("nowhere", "", 60.0, ()), tmp_path, quick=False)
    assert (outcome.status, outcome.reason) == ("failed", "exit status 1")
    (tmp_path / "nowhere.json").write_text("{}")
    run(Step("nowhere", "", 60.0, ()), tmp_path, quick=False)
    assert not (tmp_path / "nowhere.json").exists()
    remember(tmp_path, [outcome])
    remember(tmp_path, [outcome])
    assert [step["name"] for step in json.loads((tmp_path / "run.json").read_text())["steps"]] == ["nowhere"]


def test_times_of_a_start_are_read_off_its_events() -> None:
    events = [
        FleetEvent("ray", "up", 3.0),
        FleetEvent("pool", "starting a process", 5.0, pool=VISION),
        FleetEvent("pool", "load", 9.0, pool=VISION, replica="r1"),
        FleetEvent("pool", "ready", 14.5, pool=VISION),
        FleetEvent("ready", "the fleet answers", 16.0),
    ]
    report = pb.ReplicaReport(startup=[pb.StageReport(name="capture openvino", milliseconds=2500.0)])
    row = start.row_of(SimpleNamespace(events=events, reports={VISION: [report]}), "empty")
    assert (row["replica ready s"], row["Ray and Serve up s"], row["fleet answers s"]) == (9.5, 5.0, 16.0)
    assert row["capture openvino s"] == 2.5


def test_figures_of_the_service_are_against_its_own_engine(tmp_path: Path) -> None:
    findings = serve.Findings(tmp_path, None)
    for way, load, rate, p50 in (("router", 1, 30.0, 33.0), ("router", 32, 38.0, 800.0), ("direct", 1, 31.0, 32.0)):
        row = {"load": serve.closed(load), "items/s": rate, "p50 ms": p50, "p95 ms": p50, "p99 ms": p50, "errors": 0}
        findings.rows.append(serve.flat(row | {"cores": {"client": 0.1}, "stages": {}}, "bf16", way))
    serve._compare(
        findings,
        "bf16",
        [{"batch": 1, "items/s": 36.0, "median ms": 27.5}, {"batch": 32, "items/s": 40.0, "median ms": 800.0}],
    )
    serve._figures(findings, "bf16", 32)
    assert findings.figures["bf16 service over bare engine"] == pytest.approx(0.95)
    assert findings.figures["bf16 p50 over bare batch-1 ms"] == pytest.approx(5.5)
    assert findings.figures["bf16 router's share of p50 ms"] == pytest.approx(1.0)
