"""How a test runs code on simulated NPUs: a child process with the simulator's environment.

In a test::

    from tests.npu_sim.launch import SimulatedMachine, run_inside

    def test_ascend_attention() -> None:
        run_inside("tests/npu_sim/inside/test_ascend_attn.py").require_success()

From a shell, with pytest's own output::

    python -m tests.npu_sim.launch tests/npu_sim/inside/test_operators.py -k gelu
"""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from .build import ToolchainMissing
from .install import DEFAULT_DESTINATION, PROJECT_ROOT, Installation, WheelUnavailable, install
from .machines import DEFAULT_MACHINE, machine_for
from .settings import Misbehaviour, SimulatedMachine

__all__ = [
    "InsideReport",
    "Misbehaviour",
    "SimulatedMachine",
    "installed_or_skip",
    "run_inside",
    "run_python",
    "run_simulated",
    "run_together",
]

PACKAGE = "tests.npu_sim"
INSIDE_INI = Path(__file__).parent / "inside" / "pytest.ini"
MODULE_SECONDS = 240
OUTPUT_TAIL = 4000


@functools.cache
def _installation() -> Installation | str:
    """The installation, or why this host cannot have one; found out once a process."""
    try:
        return install(DEFAULT_DESTINATION, say=lambda line: None)
    except (ToolchainMissing, WheelUnavailable) as reason:
        return str(reason)


def installed_or_skip() -> Installation:
    """The installation, made when it is missing; skips the calling test when this host cannot have one."""
    found = _installation()
    if isinstance(found, str):
        pytest.skip(found)
    return found


def simulated_environment(machine: SimulatedMachine, at: Installation) -> dict[str, str]:
    """The environment of a process that runs on ``machine``: this process's own, with what the simulator needs."""
    env = machine.environment(os.environ)

    def prepend(name: str, *folders: Path) -> None:
        env[name] = os.pathsep.join([*map(str, folders), *filter(None, [env.get(name)])])

    prepend("LD_LIBRARY_PATH", at.libraries)
    prepend("PYTHONPATH", at.wheel, PROJECT_ROOT)
    env["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"  # torch_npu is imported by the simulator, after torch
    env["TASK_QUEUE_ENABLE"] = "0"  # launches happen on the calling thread
    env["HF_HUB_OFFLINE"] = "1"
    env["PYTEST_DISABLE_PLUGIN_AUTOLOAD"] = "1"  # other plugins cost more than a second a process
    return env


def run_python(
    arguments: Sequence[str], machine: SimulatedMachine = DEFAULT_MACHINE, timeout: float = MODULE_SECONDS
) -> subprocess.CompletedProcess[str]:
    """Runs the interpreter with ``arguments`` in the simulator's environment; the simulator itself is not started.

    Returns the finished process; ``stdout`` holds both streams. A process that overstays ``timeout`` is killed.
    """
    env = simulated_environment(machine, installed_or_skip())
    command = [sys.executable, *arguments]
    with subprocess.Popen(
        command,
        env=env,
        cwd=PROJECT_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            output, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            output += f"\nnpu simulator: stopped after {timeout} s"
    return subprocess.CompletedProcess(command, process.returncode, output)


def run_simulated(
    target: str | Path,
    *arguments: str,
    machine: SimulatedMachine = DEFAULT_MACHINE,
    timeout: float = MODULE_SECONDS,
) -> subprocess.CompletedProcess[str]:
    """Runs a script (a path) or a module (a dotted name) as ``__main__`` with the simulator started before it.

    Returns as ``run_python`` does.
    """
    return run_python(["-m", f"{PACKAGE}.run", str(target), *arguments], machine, timeout)


@dataclass(frozen=True)
class InsideReport:
    """What pytest modules did on a simulated machine. The pairs are (test, what pytest said of it)."""

    module: str
    passed: tuple[str, ...]
    failed: tuple[tuple[str, str], ...]
    skipped: tuple[tuple[str, str], ...]
    returncode: int
    output: str

    def of(self, module: Path) -> InsideReport:
        """The part of one module; failures in others are not its own, a process that broke off is everybody's."""

        def own(name: str) -> bool:
            return module.stem in name.partition("::")[0].split(".")

        return InsideReport(
            module.name,
            tuple(name for name in self.passed if own(name)),
            tuple((name, text) for name, text in self.failed if own(name)),
            tuple((name, why) for name, why in self.skipped if own(name)),
            0 if self.returncode == pytest.ExitCode.TESTS_FAILED else self.returncode,
            self.output,
        )

    def require_success(self, allow_skips: bool = False) -> None:
        """Fails the calling test, showing every failure inside, unless all inside tests ran and passed."""
        trouble = [f"---- {name} failed on the simulated NPU ----\n{text}" for name, text in self.failed]
        if not allow_skips:
            trouble += [f"---- {name} was skipped on the simulated NPU: {why}" for name, why in self.skipped]
        if not trouble and (self.returncode != 0 or not self.passed):
            trouble = [f"{self.module}: exit status {self.returncode}, {len(self.passed)} tests passed\n{self.output}"]
        if trouble:
            pytest.fail("\n".join(trouble), pytrace=False)


def run_inside(
    module: str | Path, *options: str, machine: SimulatedMachine | None = None, timeout: float = MODULE_SECONDS
) -> InsideReport:
    """Runs a whole pytest module (a path, from the project's root) on ``machine``, or on the one of ``machines.py``.

    The module has the fixture ``simulator`` and real ``npu:N`` tensors; its pytest configuration is
    ``inside/pytest.ini``. ``options`` go to pytest.
    """
    return run_together([module], *options, machine=machine, timeout=timeout)


def run_together(
    modules: Sequence[str | Path],
    *options: str,
    machine: SimulatedMachine | None = None,
    timeout: float = MODULE_SECONDS,
) -> InsideReport:
    """As ``run_inside``, for modules of one folder in one process, on the machine of the first."""
    with tempfile.TemporaryDirectory() as scratch:
        results = Path(scratch, "results.xml")
        arguments = [*_pytest_arguments(modules), f"--junitxml={results}", *options]
        done = run_python(arguments, machine or machine_for(modules[0]), timeout)
        cases = list(ElementTree.parse(results).iter("testcase")) if results.exists() else []
    passed: list[str] = []
    failed: list[tuple[str, str]] = []
    skipped: list[tuple[str, str]] = []
    for case in cases:
        name = f"{case.get('classname')}::{case.get('name')}"
        bad = [*case.findall("failure"), *case.findall("error")]
        absent = case.find("skipped")
        if bad:
            failed.append((name, "\n".join(x.text or x.get("message") or "" for x in bad)))
        elif absent is not None:
            skipped.append((name, absent.get("message") or ""))
        else:
            passed.append(name)
    output = done.stdout[-OUTPUT_TAIL:]
    names = " ".join(map(str, modules))
    return InsideReport(names, tuple(passed), tuple(failed), tuple(skipped), done.returncode, output)


def _pytest_arguments(modules: Sequence[str | Path]) -> list[str]:
    where = ["-c", str(INSIDE_INI), "--rootdir", str(PROJECT_ROOT), "--confcutdir", str(Path(modules[0]).parent)]
    return ["-m", "pytest", "-p", "pytest_timeout", "-p", f"{PACKAGE}.plugin", *where, *map(str, modules)]


def main(arguments: list[str]) -> int:
    """``python -m tests.npu_sim.launch MODULE [pytest options]``: runs it with the output on this terminal."""
    if not arguments:
        print("usage: python -m tests.npu_sim.launch MODULE [pytest options]", file=sys.stderr)
        return 2
    env = simulated_environment(machine_for(arguments[0]), install())
    command = [sys.executable, *_pytest_arguments(arguments[:1]), *arguments[1:]]
    return subprocess.run(command, env=env, cwd=PROJECT_ROOT).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
