"""Files that may be replaced while the router runs."""

from collections.abc import Iterable
from pathlib import Path

# Of one file: device, inode, size, time of change in nanoseconds; None for one that is not there.
Signature = tuple[tuple[int, int, int, int] | None, ...]


def signature(paths: Iterable[Path]) -> Signature:
    """What differs when one of the files was written or replaced; links are followed, as in a mounted secret."""
    return tuple(_of(path) for path in paths)


def _of(path: Path) -> tuple[int, int, int, int] | None:
    try:
        found = path.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns
