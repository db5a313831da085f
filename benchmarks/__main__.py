"""Runs the benchmarks one after the other, each in processes of its own, and writes the page.

A benchmark that fails or takes too long does not stop the others; the page says so.
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.page import STEPS, write
from benchmarks.plan import ROOT
from benchmarks.results import FOLDER, arguments_of, say
from benchmarks.subjects import FOLDER as SCRATCH

PEERS = "peers"
# A fleet that stops in order may take a minute.
GRACE_S = 90.0


@dataclass(frozen=True)
class Step:
    """A benchmark: what it does, after how many seconds it is ended, and options that only show that it runs."""

    name: str
    what: str
    limit_s: float
    quick: tuple[str, ...]


@dataclass(frozen=True)
class Outcome:
    """How a step ended: done, failed or ended at its limit."""

    name: str
    status: str
    seconds: float
    reason: str


DEMO = ("--model", "demo")
ALL = (
    Step("ceiling", "the machine's matrix rate at the tower's shapes", 240, ("--batches", "1", "--dtypes", "float32")),
    Step(
        "engine",
        "the bare engine against it",
        420,
        ("--kinds", "vision bf16 openvino", "--batches", "1", "--seconds", "1", "--no-limit"),
    ),
    Step("preprocess", "JPEG to pixels", 120, ("--pictures", "4", "--seconds", "0.5")),
    Step("isolation", "decoding in worker processes", 90, ("--seconds", "0.1")),
    Step("router", "the router in front of a trivial pool", 150, ("--rounds", "1", "--seconds", "1", "--clients", "8")),
    Step("start", "starts with an empty and a filled cache", 300, (*DEMO, "--again", "1")),
    Step(
        "serve",
        "the service, closed and open loops, beside the bare engine",
        720,
        (*DEMO, "--clients", "1", "4", "--seconds", "1", "--warmup", "0.5", "--no-int8", "--no-lanes", "--no-bare"),
    ),
    Step(
        "growth",
        "cost against load, and memory over 10,000 pictures",
        600,
        (*DEMO, "--items", "1", "8", "--clients", "1", "4", "--replicas", "1", "--pictures", "1000", "--seconds", "1"),
    ),
)
PEER_STEP = Step(
    PEERS,
    "side by side with transformers, sentence-transformers, infinity and clip-as-service",
    2700,
    (*DEMO, "--clients", "4", "--settings", "1", "--seconds", "1"),
)


def run(step: Step, folder: Path, quick: bool) -> Outcome:
    """One step in a process group of its own, which is ended as a whole at its limit."""
    command = [sys.executable, "-m", f"benchmarks.{step.name}", "--folder", str(folder), *(step.quick if quick else ())]
    (folder / f"{step.name}.json").unlink(missing_ok=True)  # no figure of an older run stays
    started = time.monotonic()
    process = subprocess.Popen(command, cwd=ROOT, start_new_session=True, stdin=subprocess.DEVNULL)
    try:
        status = process.wait(step.limit_s)
    except subprocess.TimeoutExpired:
        end(process)
        return Outcome(step.name, "ended", time.monotonic() - started, f"it was not done after {step.limit_s:g} s")
    except BaseException:
        end(process)
        raise
    reason = f"exit status {status}" if status else ""
    return Outcome(step.name, "failed" if status else "done", time.monotonic() - started, reason)


def end(process: "subprocess.Popen[bytes]") -> None:
    """SIGINT lets a benchmark stop its fleet in order; what is left of the group is killed."""
    for number in (signal.SIGINT, signal.SIGKILL):
        try:
            os.killpg(process.pid, number)
            process.wait(GRACE_S)
        except (ProcessLookupError, subprocess.TimeoutExpired):
            continue


def remember(folder: Path, outcomes: Sequence[Outcome]) -> None:
    """Adds to run.json, in which a step of an earlier call stays until it runs again."""
    path = folder / f"{STEPS}.json"
    before = json.loads(path.read_text())["steps"] if path.exists() else []
    names = {outcome.name for outcome in outcomes}
    steps = [step for step in before if step["name"] not in names] + [asdict(outcome) for outcome in outcomes]
    path.write_text(json.dumps({"steps": steps}, indent=1) + "\n")


def main() -> None:
    """Exit status 1 when a benchmark was not done."""
    parser = arguments_of(__doc__)
    every = [*ALL, PEER_STEP]
    parser.add_argument("--only", nargs="+", choices=[step.name for step in every], help="these, in the usual order")
    parser.add_argument("--peers", action=argparse.BooleanOptionalAction, default=False, help="the peers and no others")
    parser.add_argument(
        "--quick", action="store_true", help="tiny settings, to see that all runs; not to docs/benchmarks"
    )
    options = parser.parse_args()
    if options.quick and options.folder == FOLDER:
        options.folder = SCRATCH / "quick"
    steps = [PEER_STEP] if options.peers else list(ALL)
    if options.only:
        steps = [step for step in every if step.name in options.only]
    options.folder.mkdir(parents=True, exist_ok=True)
    say(f"load average {os.getloadavg()[0]:.2f} on {os.cpu_count()} cores: figures are good on an idle machine only")
    outcomes = []
    for number, step in enumerate(steps, 1):
        say(f"[{number}/{len(steps)}] {step.name}: {step.what}")
        outcomes.append(run(step, options.folder.resolve(), options.quick))
        say(f"[{number}/{len(steps)}] {step.name}: {outcomes[-1].status} after {outcomes[-1].seconds:.0f} s")
        remember(options.folder, outcomes)
        say(f"page: {write(options.folder)}")
    bad = [outcome for outcome in outcomes if outcome.status != "done"]
    for outcome in bad:
        say(f"{outcome.name}: {outcome.status}, {outcome.reason}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
