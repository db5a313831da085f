"""Keeps converted models on disk between starts: converting takes seconds, reading one back maps its file.

An entry is a folder named by a digest of all that decides its content. It is written beside its place and renamed, so
that replicas which start together do not read each other's halves; what does not match its own digest is made anew.
"""

import hashlib
import json
import os
import shutil
import tempfile
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

from encoder.attention.dispatch import CallTrace

MODEL, WEIGHTS, FACTS = "model.xml", "model.bin", "facts.json"
KEPT_ENTRIES = 8


class IrStore:
    """Entries of one folder; the least recently used ones go when there are more than KEPT_ENTRIES."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def find(self, key: Sequence[str]) -> tuple[Path, CallTrace] | None:
        """The model's file, and what its attention calls did when it was traced; None when there is no whole one."""
        entry = self._entry(key)
        try:
            facts = json.loads((entry / FACTS).read_text())
            if _digest(entry) != facts["digest"]:
                return None
            os.utime(entry)
            return entry / MODEL, CallTrace(facts["fused"], Counter(facts["fallback"]))
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def keep(self, key: Sequence[str], write: Callable[[Path], None], trace: CallTrace) -> Path:
        """`write` puts the model at the path it is given; returns where it then is. Raises OSError."""
        self._folder.mkdir(parents=True, exist_ok=True)
        entry = self._entry(key)
        made = Path(tempfile.mkdtemp(prefix=".new-", dir=self._folder))
        try:
            write(made / MODEL)
            facts = {"key": list(key), "digest": _digest(made), "fused": trace.fused, "fallback": trace.fallback}
            (made / FACTS).write_text(json.dumps(facts, indent=1))
            shutil.rmtree(entry, ignore_errors=True)  # a damaged one; whoever has it mapped keeps what it has
            made.rename(entry)
        except OSError:
            if self.find(key) is None:  # else another replica was quicker, and its entry is as good
                raise
        finally:
            shutil.rmtree(made, ignore_errors=True)
        self._forget_old()
        return entry / MODEL

    def _entry(self, key: Sequence[str]) -> Path:
        return self._folder / hashlib.sha256(json.dumps(list(key)).encode()).hexdigest()[:32]

    def _forget_old(self) -> None:
        entries = [path for path in self._folder.iterdir() if path.is_dir() and not path.name.startswith(".")]
        for path in sorted(entries, key=lambda path: path.stat().st_mtime)[:-KEPT_ENTRIES]:
            shutil.rmtree(path, ignore_errors=True)


def _digest(entry: Path) -> str:
    """Of the model's two files."""
    with (entry / MODEL).open("rb") as model, (entry / WEIGHTS).open("rb") as weights:
        return "".join(hashlib.file_digest(file, "sha256").hexdigest() for file in (model, weights))
