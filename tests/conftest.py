"""What all tests share: a cache folder of their own, and how they part when several run side by side."""

import os
from collections.abc import Iterator

import pytest

# Tests of these folders share what is dear to start or to install; elsewhere a file's do.
TOGETHER = ("tests/e2e/", "tests/npu_sim/")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Says which tests one worker has to run (pytest-xdist, `--dist loadgroup`), before xdist looks."""
    for item in items:
        file = item.nodeid.partition("::")[0]
        group = next((folder for folder in TOGETHER if file.startswith(folder)), file)
        item.add_marker(pytest.mark.xdist_group(group))


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
