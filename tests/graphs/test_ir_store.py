"""Converted models on disk: found again by all that decided them, never half-written, never damaged."""

import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from encoder.attention.dispatch import CallTrace
from encoder.graphs import ir_store
from encoder.graphs.ir_store import IrStore

TRACE = CallTrace(12, Counter({"mask additive": 3}))


def writing(content: bytes) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        path.write_text("<net/>")
        path.with_name("model.bin").write_bytes(content)

    return write


def test_what_is_kept_is_found_by_its_key_alone(tmp_path: Path) -> None:
    store = IrStore(tmp_path / "made" / "here")
    assert store.find(["a", "b"]) is None
    path = store.keep(["a", "b"], writing(b"one"), TRACE)
    assert store.find(["a", "b"]) == (path, TRACE)
    assert path.with_name("model.bin").read_bytes() == b"one"
    assert store.find(["ab"]) is None and store.find(["a", "b", ""]) is None and store.find(["b", "a"]) is None


@pytest.mark.parametrize("file", ["model.xml", "model.bin", "facts.json"])
@pytest.mark.parametrize("damage", ["cut", "changed", "gone"])
def test_a_damaged_entry_is_none_and_is_made_anew(file: str, damage: str, tmp_path: Path) -> None:
    store = IrStore(tmp_path)
    hurt = store.keep(["k"], writing(b"one two three"), TRACE).with_name(file)
    if damage == "gone":
        hurt.unlink()
    else:
        content = hurt.read_bytes()
        hurt.write_bytes(content[:-1] if damage == "cut" else content.replace(content[-3:], b"xyz"))
    assert store.find(["k"]) is None
    store.keep(["k"], writing(b"again"), TRACE)
    found = store.find(["k"])
    assert found is not None and found[0].with_name("model.bin").read_bytes() == b"again"


def test_a_write_that_fails_leaves_nothing(tmp_path: Path) -> None:
    def fails(path: Path) -> None:
        path.write_text("half")
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        IrStore(tmp_path).keep(["k"], fails, TRACE)
    assert list(tmp_path.iterdir()) == []


def test_whoever_comes_second_takes_what_is_there(tmp_path: Path) -> None:
    """Two replicas convert at once, and the other one's entry lands between this one's check and its rename."""
    other = IrStore(tmp_path)

    def slow(path: Path) -> None:
        writing(b"mine")(path)
        other.keep(["k"], writing(b"theirs"), TRACE)
        raise OSError("directory not empty")

    path = IrStore(tmp_path).keep(["k"], slow, TRACE)
    assert path.with_name("model.bin").read_bytes() == b"theirs"
    assert len(list(tmp_path.iterdir())) == 1


def test_the_least_recently_used_go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ir_store, "KEPT_ENTRIES", 2)
    store = IrStore(tmp_path)
    paths = {name: store.keep([name], writing(name.encode()), TRACE) for name in ("old", "used")}
    os.utime(paths["old"].parent, (1, 1))
    os.utime(paths["used"].parent, (2, 2))
    assert store.find(["old"]) is not None  # used just now
    store.keep(["new"], writing(b"new"), TRACE)
    assert [store.find([name]) is not None for name in ("old", "used", "new")] == [True, False, True]
