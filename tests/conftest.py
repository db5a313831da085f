"""What all tests share: a cache folder of their own, which the processes that they start find as well; their order."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

# They take longest: started first, none of them is left alone at the end of a run of files side by side.
FIRST = (
    "deployments/test_serve.py",
    "npu_sim/test_npu_sim.py",
    "parity/test_quick.py",
    "engine/test_parity.py",
    "e2e/test_fleet.py",
    "engine/test_openvino.py",
    "npu_sim/test_check_command.py",
)
RANKS = {Path(__file__).parent / name: rank for rank, name in enumerate(FIRST)}


@pytest.hookimpl(trylast=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: RANKS.get(item.path, len(FIRST)))


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """So that nobody's converted models are read, and none are left behind."""
    before = os.environ.get("XDG_CACHE_HOME")
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["XDG_CACHE_HOME"]
    else:
        os.environ["XDG_CACHE_HOME"] = before
