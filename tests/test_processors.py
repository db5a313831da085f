"""How many processors a replica may keep busy, and whether its forward leaves any to those who decode."""

import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from encoder import engine
from encoder.devices import cpu
from encoder.engine import Engine


@pytest.fixture
def eight(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that is tied to eight processors."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


@pytest.mark.parametrize(
    ("files", "processors"),
    [
        ({}, 8),
        ({"cpu.max": "max 100000\n"}, 8),
        ({"cpu.max": "400000 100000\n"}, 4),
        ({"cpu.max": "250000 100000\n"}, 3),
        ({"cpu.max": "50000 100000\n"}, 1),
        ({"cpu.max": "3200000 100000\n"}, 8),
        ({"cpu.max": "nonsense"}, 8),
        ({"cpu.max": "100000 0\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        ({"cpu/cpu.cfs_quota_us": "200000\n", "cpu/cpu.cfs_period_us": "100000\n"}, 2),
    ],
)
@pytest.mark.usefixtures("eight")
def test_a_container_s_limit_counts(tmp_path: Path, files: dict[str, str], processors: int) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    assert cpu.usable_processors(tmp_path) == processors


def test_without_control_groups_it_is_what_the_process_is_tied_to(tmp_path: Path) -> None:
    assert cpu.usable_processors(tmp_path) == len(os.sched_getaffinity(0))


def test_where_no_process_can_be_tied_all_processors_count(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    assert cpu.usable_processors(tmp_path) == os.cpu_count()


@pytest.mark.parametrize(
    ("kind", "threads", "preparing", "shares"),
    [
        ("cpu", 4, 4, True),
        ("cpu", 6, 5, True),
        ("cpu", 3, 4, False),  # one processor is left to whoever decodes
        ("cpu", 4, 2, False),  # decoding leaves two idle
        ("cuda", 4, 4, False),
    ],
)
def test_who_shares_processors(
    monkeypatch: pytest.MonkeyPatch, kind: str, threads: int, preparing: int, shares: bool
) -> None:
    monkeypatch.setattr(engine, "usable_processors", lambda: 4)
    monkeypatch.setattr(engine.torch, "get_num_threads", lambda: threads)
    made = SimpleNamespace(_device=SimpleNamespace(kind=kind))
    assert Engine.shares_processors(made, preparing) is shares  # type: ignore[arg-type]
