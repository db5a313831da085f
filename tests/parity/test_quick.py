"""A quick cut of the parity table: small models, eight pictures, every family; and what vectors do not depend on."""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.parity.cases import Case
from tests.parity.encode import encode, open_engine
from tests.parity.invariance import differing
from tests.parity.measure import Plan, Subject, compare, npu_rows, prepare
from tests.parity.pictures import drawn
from tests.parity.registry import all_cases

CASES = all_cases()
# What start-up proves by itself is tested elsewhere, and costs more than all that is measured here.
RUNS = (("eager", "float32"), ("openvino", "float32"), ("eager", "bfloat16"), ("eager", "float16"))
QUICK: dict[str, object] = {"buckets": [1, 8], "self_check": False, "threads": 1}
PLAN = Plan("small", drawn(8), ("eager", "openvino"), ("float32", "bfloat16"), 4)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    """Small models on several threads are slower, and much so beside other tests."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
    case = CASES[name]
    subject = subject_of(case, subjects, folder)
    assert [(row.mode, row.equal, row.failures) for row in subject.pixels] == [
        (mode, len(PLAN.pictures), []) for mode in case.modes
    ]
    for runner, dtype in RUNS:
        if runner in case.skip:
            continue
        engine = open_engine({**subject.settings(runner, dtype), **QUICK, **case.settings})
        row = compare(subject, runner, dtype, encode(engine, subject.data))
        assert (row.pictures, row.failures) == (len(PLAN.pictures), [])
        assert differing(engine, subject.data) == []
        engine.close()


def test_the_simulated_npu(subjects: dict[str, Subject], folder: Path) -> None:
    asked = [(subject_of(case, subjects, folder), "bfloat16") for case in CASES.values() if "npu" not in case.skip]
    rows = npu_rows(asked, PLAN.npu_pictures, folder, buckets=[PLAN.npu_pictures], self_check=False, threads=1)
    found = {subject.case.name: row for (subject, _), row in zip(asked, rows, strict=True)}
    assert {name: row.failures for name, row in found.items() if row.failures} == {}
    assert all(row.pictures == PLAN.npu_pictures for row in rows)
