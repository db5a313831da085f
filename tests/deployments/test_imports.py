"""A replica's process imports no SciPy for what only training needs, and has it where it is asked for."""

import subprocess
import sys

import pytest

from deployments.imports import nothing_for_training

pytest.importorskip("scipy")

LOADS_A_TOWER = """
import sys
from contextlib import nullcontext
from deployments.imports import nothing_for_training

with nothing_for_training() if sys.argv[1] == "lean" else nullcontext():
    import encoder.models.clip
print("scipy" in sys.modules)

import transformers
from transformers.utils import import_utils
print(all(one.is_scipy_available() for one in (transformers, transformers.utils, import_utils)))

import scipy.optimize
print(scipy.optimize.linear_sum_assignment([[2.0, 1.0], [1.0, 2.0]])[1].tolist())
"""


@pytest.mark.parametrize(("how", "imported"), [("lean", False), ("as it comes", True)])
def test_scipy_is_not_imported_for_losses(how: str, imported: bool) -> None:
    done = subprocess.run([sys.executable, "-c", LOADS_A_TOWER, how], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split("\n")[:3] == [str(imported), "True", "[1, 0]"]


def test_transformers_is_asked_as_before_when_an_import_fails() -> None:
    from transformers import utils

    usual = utils.is_scipy_available
    with pytest.raises(ImportError), nothing_for_training():
        assert not utils.is_scipy_available()
        raise ImportError
    assert utils.is_scipy_available is usual
