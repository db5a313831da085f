"""Models of real size in the simulator; minutes, so only where `long` tests are asked for."""

from pathlib import Path

import pytest

from .launch import run_inside

MODULE = Path(__file__).parent / "inside_long" / "test_real_size.py"
SECONDS = 3000


@pytest.mark.long
@pytest.mark.timeout(SECONDS + 60)
def test_models_of_real_size() -> None:
    run_inside(MODULE, f"--timeout={SECONDS}", timeout=SECONDS).require_success()
