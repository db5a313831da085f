"""Holds one case against its oracle: pixels bit for bit, then vectors and features on every runner and dtype."""

import json
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tests.npu_sim.launch import SimulatedMachine, run_simulated
from tests.parity.cases import Case, Expected, Inputs, Mode, Size
from tests.parity.encode import Found, encode, load_found, open_engine, save_pictures
from tests.parity.pictures import Picture

FLOAT32_ERROR = 2e-5
END_COSINE = 0.9999
NPU_SECONDS = 3000
# With room for a model of real size in float32.
NPU_MACHINE = SimulatedMachine(device_count=1, memory_bytes=8 << 30, threads=2)


@dataclass(frozen=True)
class PixelRow:
    """Pixels of one preprocessing mode: how many pictures are bit-equal to the publisher's processor."""

    mode: str
    equal: int
    pictures: int
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class TowerRow:
    """One runner with one dtype: worst cosine and largest absolute error between vectors of length 1.

    `tower`: from the project's own pixels. `end`: from the picture's bytes, against the publisher's processor and
    model. `features`: patch by patch; -1 where the family gives none. `failures`: what is outside its bounds.
    """

    runner: str
    dtype: str
    backend: str
    pictures: int
    tower_cosine: float
    tower_error: float
    features_cosine: float
    features_error: float
    end_cosine: float
    end_error: float
    failures: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class CaseResult:
    """All that was measured of one case."""

    name: str
    family: str
    size: str
    pixels: list[PixelRow]
    rows: list[TowerRow]
    not_run: dict[str, str]

    @property
    def failures(self) -> list[str]:
        """What is outside its bounds, each a line."""
        lines = [f"{self.name} pixels {row.mode}: {failure}" for row in self.pixels for failure in row.failures]
        return lines + [f"{self.name} {row.runner} {row.dtype}: {why}" for row in self.rows for why in row.failures]

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Plan:
    """What to run: runners, dtypes, and how many of the pictures the simulated NPU gets."""

    size: Size
    pictures: Sequence[Picture]
    runners: Sequence[str]
    dtypes: Sequence[str]
    npu_pictures: int


@dataclass(frozen=True)
class Subject:
    """A case with its checkpoint and all that its oracle says."""

    case: Case
    size: Size
    checkpoint: Path
    data: list[bytes]
    pixels: list[PixelRow]
    tower: Expected
    end: Expected

    def settings(self, runner: str, dtype: str) -> dict[str, Any]:
        """Of the engine that is to be measured."""
        return _settings(self.case, self.checkpoint, runner, dtype, self.case.modes[0])


def measure(cases: Sequence[Case], plan: Plan, folder: Path) -> list[CaseResult]:
    """Measures cases in `folder`, which is empty; those on the simulated NPU all in one process of it."""
    subjects = [prepare(case, plan, folder) for case in cases]
    rows = {
        subject.case.name: [
            cpu_row(subject, runner, dtype)
            for runner in plan.runners
            for dtype in plan.dtypes
            if runner != "npu" and runner not in subject.case.skip
        ]
        for subject in subjects
    }
    if "npu" in plan.runners:
        asked = [(subject, dtype) for subject in subjects for dtype in plan.dtypes if "npu" not in subject.case.skip]
        for (subject, _), row in zip(asked, npu_rows(asked, plan.npu_pictures, folder), strict=True):
            rows[subject.case.name].append(row)
    return [
        CaseResult(
            name=subject.case.name,
            family=subject.case.family,
            size=plan.size,
            pixels=subject.pixels,
            rows=rows[subject.case.name],
            not_run={runner: why for runner, why in subject.case.skip.items() if runner in plan.runners},
        )
        for subject in subjects
    ]


def prepare(case: Case, plan: Plan, folder: Path) -> Subject:
    """Writes the checkpoint into `folder`, compares pixels in every mode, and asks the oracle."""
    checkpoint = case.write(folder / case.name, plan.size)
    data = [picture.data for picture in plan.pictures]
    pixels: list[PixelRow] = []
    own: dict[str, list[Inputs]] = {}
    theirs: dict[str, list[Inputs]] = {}
    for mode in case.modes:
        engine = open_engine(_settings(case, checkpoint, "eager", "float32", mode) | {"self_check": False})
        own[mode] = [engine._tower.collate([engine.prepare_image(one)]) for one in data]
        engine.close()
        theirs[mode] = case.inputs(checkpoint, mode, [picture.rgb for picture in plan.pictures])
        pixels.append(_compare_pixels(mode, own[mode], theirs[mode], plan.pictures))
    tower = case.oracle(checkpoint, own[case.modes[0]])
    end = case.oracle(checkpoint, theirs[case.modes[0]]) if pixels[0].failures else tower
    return Subject(case, plan.size, checkpoint, data, pixels, tower, end)


def cpu_row(subject: Subject, runner: str, dtype: str) -> TowerRow:
    """One runner of this process with one dtype."""
    try:
        engine = open_engine(subject.settings(runner, dtype))
        try:
            found = encode(engine, subject.data)
        finally:
            engine.close()
    except Exception as error:
        return failed_row(runner, dtype, f"{type(error).__name__}: {' '.join(str(error).split())}")
    return compare(subject, runner, dtype, found)


def npu_rows(asked: Sequence[tuple[Subject, str]], pictures: int, folder: Path, **settings: object) -> list[TowerRow]:
    """Subjects with a dtype each, one after the other, on one simulated device; the first `pictures` of each.

    `settings`: of the engines, instead of the case's.
    """
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        jobs = []
        for number, (subject, dtype) in enumerate(asked):
            inside = Path(scratch, f"pictures-{number}.npz")
            save_pictures(inside, subject.data[:pictures])
            out = Path(scratch, f"found-{number}.npz")
            engine = subject.settings("npu", dtype) | settings
            jobs.append({"settings": engine, "pictures": str(inside), "out": str(out)})
        Path(scratch, "jobs.json").write_text(json.dumps(jobs))
        asked_for = str(Path(scratch, "jobs.json"))
        done = run_simulated("tests.parity.encode", asked_for, machine=NPU_MACHINE, timeout=NPU_SECONDS)
        rows = []
        for (subject, dtype), job in zip(asked, jobs, strict=True):
            out = Path(job["out"])
            if out.exists():
                rows.append(compare(subject, "npu", dtype, load_found(out)))
                continue
            reason = out.with_suffix(".error")
            rows.append(failed_row("npu", dtype, reason.read_text() if reason.exists() else done.stdout[-500:]))
        return rows


def failed_row(runner: str, dtype: str, reason: str) -> TowerRow:
    """The row of a run that gave nothing."""
    return TowerRow(runner, dtype, "", 0, -1, -1, -1, -1, -1, -1, [reason])


def _settings(case: Case, checkpoint: Path, runner: str, dtype: str, mode: Mode) -> dict[str, Any]:
    device = "npu" if runner == "npu" else "cpu"
    common: dict[str, Any] = {"model": str(checkpoint), "buckets": list(case.buckets), "preprocess": mode}
    return common | dict(case.settings) | {"runner": runner, "dtype": dtype, "device": device}


def _compare_pixels(
    mode: str, own: Sequence[Inputs], theirs: Sequence[Inputs], pictures: Sequence[Picture]
) -> PixelRow:
    wrong = [
        picture.name
        for picture, mine, other in zip(pictures, own, theirs, strict=True)
        if mine.keys() != other.keys() or not all(torch.equal(mine[name], other[name]) for name in mine)
    ]
    shown = [f"not bit-equal: {', '.join(wrong[:5])}"] if wrong else []
    return PixelRow(mode, len(pictures) - len(wrong), len(pictures), shown)


def compare(subject: Subject, runner: str, dtype: str, found: Found) -> TowerRow:
    """What an engine gave for the first pictures, against the oracle's answers for them."""
    count = len(found.vectors)
    cosine, error = distance(found.vectors, subject.tower.vectors[:count])
    end_cosine, end_error = distance(found.vectors, subject.end.vectors[:count])
    pairs = zip(found.features, subject.tower.features[:count], strict=True)
    features = [distance(mine, other) for mine, other in pairs]
    feature_cosine = min((one[0] for one in features), default=-1.0)
    feature_error = max((one[1] for one in features), default=-1.0)
    least = subject.case.bfloat16_cosine
    failures = [f"ran on {found.runner}, not {runner}: {found.refused}"] if found.runner != runner else []
    if dtype == "float32":
        if error > FLOAT32_ERROR:
            failures.append(f"tower error {error:.2e} is above {FLOAT32_ERROR:.0e}")
        if feature_error > FLOAT32_ERROR:
            failures.append(f"features' error {feature_error:.2e} is above {FLOAT32_ERROR:.0e}")
        if end_cosine < END_COSINE:
            failures.append(f"end to end cosine {end_cosine:.6f} is below {END_COSINE}")
    elif cosine < least:
        failures.append(f"tower cosine {cosine:.6f} is below {least}")
    return TowerRow(
        runner, dtype, found.backend, count, cosine, error, feature_cosine, feature_error,
        end_cosine, end_error, failures,
    )  # fmt: skip


def distance(found: np.ndarray, expected: np.ndarray) -> tuple[float, float]:
    """Least cosine, and largest absolute difference of the rows brought to length 1; float64."""
    mine, other = _unit(found), _unit(expected)
    return float((mine * other).sum(axis=1).min()), float(np.abs(mine - other).max())


def _unit(rows: np.ndarray) -> np.ndarray:
    wide = rows.astype(np.float64)
    return np.asarray(wide / np.linalg.norm(wide, axis=1, keepdims=True))
