"""Installs the NPU simulator: the real torch_npu wheel in a folder of its own, and the runtime built beside it.

``python -m tests.npu_sim.install [DEST]``, by default into ``.npu_sim`` at the project's root. Running it again checks
and returns at once. Exit codes: 0 installed, 3 no compiler, 4 the wheel cannot be had or this host cannot use it.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from .build import ToolchainMissing, build, require_toolchain, source_digest

TORCH_NPU = "torch-npu==2.13.0"
PROJECT_ROOT = Path(__file__).resolve().parents[2]
DEFAULT_DESTINATION = PROJECT_ROOT / ".npu_sim"
EXIT_NO_TOOLCHAIN = 3
EXIT_NO_WHEEL = 4
PIP_SECONDS = 300


class WheelUnavailable(RuntimeError):
    """The torch_npu wheel cannot be installed on this host."""


@dataclass(frozen=True)
class Installation:
    """Where the simulator is: ``wheel`` goes on PYTHONPATH, ``libraries`` on LD_LIBRARY_PATH."""

    destination: Path

    @property
    def wheel(self) -> Path:
        return self.destination / "wheel"

    @property
    def libraries(self) -> Path:
        return self.destination / "lib"

    @property
    def stamp(self) -> Path:
        return self.destination / "installed.json"


def _fingerprint() -> dict[str, str]:
    return {"wheel": TORCH_NPU, "python": platform.python_version(), "runtime": source_digest()}


def _stamped(at: Installation) -> dict[str, str]:
    return json.loads(at.stamp.read_text()) if at.stamp.exists() else {}


def _install_wheel(at: Installation) -> None:
    fresh = at.destination / "wheel.new"
    shutil.rmtree(fresh, ignore_errors=True)
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]
    command = [*pip, "--only-binary=:all:", "--target", str(fresh), TORCH_NPU]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PIP_SECONDS)
    except subprocess.TimeoutExpired as late:
        raise WheelUnavailable(f"pip took more than {PIP_SECONDS} s for {TORCH_NPU}: check the package index") from late
    if done.returncode != 0:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise WheelUnavailable(f"pip cannot install {TORCH_NPU}: {last}")
    shutil.rmtree(at.wheel, ignore_errors=True)
    fresh.rename(at.wheel)


@contextmanager
def _locked(destination: Path) -> Iterator[None]:
    """One installer at a time; a second one waits and then finds the work done."""
    destination.mkdir(parents=True, exist_ok=True)
    (destination / ".gitignore").write_text("*\n")
    with (destination / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def install(destination: Path = DEFAULT_DESTINATION, say: Callable[[str], None] = print) -> Installation:
    """Makes sure that the simulator is in ``destination`` and up to date; quick when it already is.

    Raises ToolchainMissing (no gcc or nm) or WheelUnavailable (pip cannot get the wheel, or not Linux).
    """
    at = Installation(destination.resolve())
    wanted = _fingerprint()
    if platform.system() != "Linux":
        raise WheelUnavailable(f"the torch_npu wheel runs on Linux alone, this is {platform.system()}")
    with _locked(at.destination):
        have = _stamped(at)
        if have == wanted:
            say(f"npu simulator: ready in {at.destination}")
            return at
        require_toolchain()
        if {**have, "runtime": ""} != {**wanted, "runtime": ""} or not at.wheel.is_dir():
            say(f"npu simulator: installing {TORCH_NPU} into {at.wheel} (about 150 MB on disk)")
            _install_wheel(at)
        say(f"npu simulator: building the runtime into {at.libraries}")
        try:
            stubs = build(at.wheel / "torch_npu", at.libraries)
        except subprocess.CalledProcessError as failed:
            raise RuntimeError(f"{failed.cmd[0]} failed while building the NPU simulator:\n{failed.stderr}") from failed
        at.stamp.write_text(json.dumps(wanted, indent=1))
        say(f"npu simulator: done, {len(stubs)} further CANN functions refuse to be called")
    return at


def main(arguments: list[str] | None = None) -> int:
    """The command line; see the module's text for the exit codes."""
    parser = argparse.ArgumentParser(prog="python -m tests.npu_sim.install", description="Install the NPU simulator.")
    parser.add_argument("destination", nargs="?", type=Path, default=DEFAULT_DESTINATION, metavar="DEST")
    try:
        install(parser.parse_args(arguments).destination)
    except ToolchainMissing as problem:
        print(f"npu simulator: {problem}", file=sys.stderr)
        return EXIT_NO_TOOLCHAIN
    except WheelUnavailable as problem:
        print(f"npu simulator: {problem}", file=sys.stderr)
        return EXIT_NO_WHEEL
    return 0


if __name__ == "__main__":
    sys.exit(main())
