"""A quick cut of the parity table: small models, eight pictures, every family."""

from pathlib import Path

import pytest

from tests.parity.cases import Case
from tests.parity.measure import Plan, Subject, cpu_row, npu_rows, prepare
from tests.parity.pictures import drawn
from tests.parity.registry import all_cases

CASES = all_cases()
PLAN = Plan("small", drawn(8), ("eager", "openvino"), ("float32", "bfloat16"), 4)


@pytest.fixture(scope="module")
def subjects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Subject]:
    return {}


def subject_of(case: Case, subjects: dict[str, Subject], folder: Path) -> Subject:
    """Each is prepared once."""
    if case.name not in subjects:
        subjects[case.name] = prepare(case, PLAN, folder)
    return subjects[case.name]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("parity")


@pytest.mark.parametrize("name", CASES)
def test_pixels_and_vectors(name: str, subjects: dict[str, Subject], folder: Path) -> None:
    subject = subject_of(CASES[name], subjects, folder)
    assert [(row.mode, row.equal, row.failures) for row in subject.pixels] == [
        (mode, len(PLAN.pictures), []) for mode in CASES[name].modes
    ]
    rows = [cpu_row(subject, runner, "float32") for runner in PLAN.runners if runner not in CASES[name].skip]
    rows.append(cpu_row(subject, "eager", "bfloat16"))
    assert [(row.runner, row.dtype, row.failures) for row in rows if row.failures] == []
    assert all(row.pictures == len(PLAN.pictures) for row in rows)


def test_the_simulated_npu(subjects: dict[str, Subject], folder: Path) -> None:
    asked = [(subject_of(case, subjects, folder), "bfloat16") for case in CASES.values() if "npu" not in case.skip]
    rows = npu_rows(asked, PLAN.npu_pictures, folder)
    found = {subject.case.name: row for (subject, _), row in zip(asked, rows, strict=True)}
    assert {name: row.failures for name, row in found.items() if row.failures} == {}
    assert all(row.pictures == PLAN.npu_pictures for row in rows)
