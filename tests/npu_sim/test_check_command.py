"""`vitfleet check --device npu` in the simulator: the proof as an operator runs it on a new node."""

import json
from pathlib import Path

import pytest

from .launch import Misbehaviour, SimulatedMachine, run_simulated

SCRIPT = "import sys\nfrom deployments.cli import main\nsys.exit(main())\n"


@pytest.fixture
def command(tmp_path: Path) -> Path:
    script = tmp_path / "vitfleet.py"
    script.write_text(SCRIPT)
    return script


def test_the_proof_holds_on_a_910b(command: Path) -> None:
    done = run_simulated(command, "check", "--device", "npu")
    assert done.returncode == 0, done.stdout
    assert "npu:0 Ascend910B2" in done.stdout and "ascend_attn" in done.stdout
    assert "capture npu batch=32" in done.stdout and "prove npu batch=1" in done.stdout
    assert "ascend_attn was rejected: takes no causal+key_padding mask" in done.stdout  # by the text tower


def test_a_demotion_is_told_and_the_proof_holds_with_what_is_left(command: Path) -> None:
    broken = SimulatedMachine(misbehave=Misbehaviour.NAN_OUTPUT)
    done = run_simulated(command, "check", "--device", "npu", "--tower", "vision", "--json", machine=broken)
    assert done.returncode == 0, done.stdout
    (replica,) = json.loads(done.stdout[done.stdout.index("\n{") :])["replicas"]
    assert replica["backend"]["name"] == "sdpa"
    assert [one["name"] for one in replica["backend"]["rejected"]] == ["ascend_attn"]
    assert {graph["backend"] for graph in replica["graphs"]} == {"sdpa"}


def test_without_a_device_the_exit_code_says_so(command: Path) -> None:
    done = run_simulated(command, "check", "--device", "npu", machine=SimulatedMachine(device_count=0))
    assert done.returncode == 1, done.stdout
    assert "npu device 0 of 1 claimed: this process sees 0" in done.stdout and "Traceback" not in done.stdout
