"""Installs the simulator when it is missing and runs the modules under ``inside/`` on simulated machines.

The modules of one machine, which ``machines.py`` names, share a process. A failure inside fails the test of its module
here, with pytest's text of it.
"""

import functools
import subprocess
import sys
from pathlib import Path

import pytest

from . import install, launch
from .launch import (
    InsideReport,
    Misbehaviour,
    SimulatedMachine,
    installed_or_skip,
    run_inside,
    run_python,
    run_simulated,
    run_together,
)
from .machines import companies

INSIDE = Path(__file__).parent / "inside"
COMPANY_SECONDS = 540
MODULES = sorted(path.name for path in INSIDE.glob("test_*.py"))


@functools.cache
def report_of(company: tuple[str, ...]) -> InsideReport:
    return run_together([INSIDE / module for module in company], timeout=COMPANY_SECONDS)


@pytest.mark.timeout(COMPANY_SECONDS + 60)
@pytest.mark.parametrize(
    ("module", "company"),
    [pytest.param(module, tuple(company), id=module) for company in companies(MODULES) for module in company],
)
def test_inside(module: str, company: tuple[str, ...]) -> None:
    report_of(company).of(INSIDE / module).require_success()


def test_no_module_is_left_out() -> None:
    assert sorted(module for company in companies(MODULES) for module in company) == MODULES


def test_installing_again_is_quick_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    at = installed_or_skip()
    stamp = at.stamp.stat().st_mtime_ns
    assert install.main([str(at.destination)]) == 0
    assert "ready in" in capsys.readouterr().out
    assert at.stamp.stat().st_mtime_ns == stamp


def test_without_a_compiler_one_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert install.main([str(tmp_path / "dest")]) == install.EXIT_NO_TOOLCHAIN
    said = capsys.readouterr()
    assert said.err.strip().splitlines() == [
        "npu simulator: the NPU simulator needs gcc and nm to build its runtime: install gcc and binutils"
    ]


def test_without_the_wheel_one_line_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(install, "TORCH_NPU", "torch-npu==0.0.1")
    assert install.main([str(tmp_path / "dest")]) == install.EXIT_NO_WHEEL
    assert "pip cannot install torch-npu==0.0.1" in capsys.readouterr().err
    assert not (tmp_path / "dest" / "installed.json").exists()


def test_a_host_that_cannot_have_it_skips_with_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_installation", lambda: "no compiler here")
    with pytest.raises(pytest.skip.Exception, match="no compiler here"):
        run_inside(INSIDE / MODULES[0])


def test_a_script_runs_on_the_machine_that_was_asked_for(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "import sys, torch, torch_npu\n"
        "from tests.npu_sim.simulator import start\n"
        "x = torch.zeros(4, 1, 64, dtype=torch.float16, device='npu:0')\n"
        "y = torch_npu.npu_fused_infer_attention_score(x, x, x, num_heads=1, input_layout='TND',\n"
        "    actual_seq_lengths=[4], actual_seq_lengths_kv=[4])[0]\n"
        "print(torch_npu.npu.get_device_name(0), torch_npu.npu.device_count(), torch_npu.npu.mem_get_info()[1],\n"
        "      start().runtime.stream_limit(), bool(y.cpu().isnan().all()), sys.argv[1:])\n"
    )
    machine = SimulatedMachine(
        "Ascend910B4", device_count=3, memory_bytes=1 << 28, stream_limit=77, misbehave=Misbehaviour.NAN_OUTPUT
    )
    done = run_simulated(script, "--word", machine=machine)
    assert done.returncode == 0, done.stdout
    assert f"Ascend910B4 3 {1 << 28} 77 True ['--word']" in done.stdout


def test_a_process_that_overstays_is_stopped() -> None:
    done = run_python(["-c", "import time; time.sleep(600)"], timeout=2)
    assert done.returncode == -9
    assert "stopped after 2 s" in done.stdout


@pytest.fixture(scope="module")
def troubled(tmp_path_factory: pytest.TempPathFactory) -> InsideReport:
    module = tmp_path_factory.mktemp("inside") / "test_troubled.py"
    module.write_text(
        "import pytest, torch, torch_npu\n"
        "def test_good(): pass\n"
        "def test_bad(): assert torch.ones(1, device='npu:0').item() == 2.0, 'one is not two'\n"
        "def test_absent(): pytest.skip('not today')\n"
    )
    return run_inside(module)


def test_failures_inside_are_shown(troubled: InsideReport) -> None:
    assert [len(x) for x in (troubled.passed, troubled.failed, troubled.skipped)] == [1, 1, 1]
    with pytest.raises(pytest.fail.Exception) as shown:
        troubled.require_success(allow_skips=True)
    assert "test_bad failed on the simulated NPU" in str(shown.value)
    assert "one is not two" in str(shown.value)
    assert "not today" not in str(shown.value)


def test_failures_are_their_modules_alone_and_a_crash_is_everybodys() -> None:
    fails = (("a.test_bad::test_x", "one is not two"),)
    report = InsideReport("both", ("a.test_good.TestIt::test_y", "a.test_bad::test_y"), fails, (), 1, "")
    report.of(Path("test_good.py")).require_success()
    with pytest.raises(pytest.fail.Exception, match="one is not two"):
        report.of(Path("test_bad.py")).require_success()
    with pytest.raises(pytest.fail.Exception, match="exit status 0, 0 tests passed"):
        report.of(Path("test_x.py")).require_success()
    crashed = InsideReport("both", ("a.test_good::test_y",), (), (), -11, "Segmentation fault")
    with pytest.raises(pytest.fail.Exception, match="exit status -11, 1 tests passed"):
        crashed.of(Path("test_good.py")).require_success()


def test_skips_inside_are_failures_unless_allowed() -> None:
    report = InsideReport("m", ("a",), (), (("b", "not today"),), 0, "")
    with pytest.raises(pytest.fail.Exception, match="b was skipped on the simulated NPU: not today"):
        report.require_success()
    report.require_success(allow_skips=True)


def test_a_crash_inside_is_shown() -> None:
    with pytest.raises(pytest.fail.Exception, match=r"exit status -11, 0 tests passed\nSegmentation fault"):
        InsideReport("m", (), (), (), -11, "Segmentation fault").require_success()


def test_the_modules_inside_are_not_collected_outside() -> None:
    command = [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", str(INSIDE)]
    done = subprocess.run(command, cwd=install.PROJECT_ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, done.stdout
