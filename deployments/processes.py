"""Processes and ports of one fleet on this machine, kept apart from everybody else's. Linux; knows no Ray."""

import ctypes
import fcntl
import os
import random
import socket
import tempfile
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from types import TracebackType

import psutil

from encoder.errors import Unsupported

# In the environment of every process of a fleet, inherited by all they start: a process is found by it wherever it was
# re-parented to.
MARK_VARIABLE = "VITFLEET_FLEET"
# Below the ports that Linux gives to outgoing connections (32768 and up), above the registered ones in common use.
BLOCK_RANGE = (20480, 32512)
BLOCK_SIZE = 64
_PR_SET_CHILD_SUBREAPER = 36


class PortBlock:
    """`BLOCK_SIZE` consecutive free ports that no other fleet of this machine takes, until `release` or process end.

    The lock file's descriptor may be inherited: the block is held until the last holder has closed it.
    """

    def __init__(self, first: int, lock: int) -> None:
        self.first = first
        self.lock = lock

    @classmethod
    def reserve(cls) -> "PortBlock":
        """Raises Unsupported when there is no free block."""
        folder = Path(tempfile.gettempdir()) / "vitfleet-ports"
        folder.mkdir(exist_ok=True)
        blocks = list(range(BLOCK_RANGE[0], BLOCK_RANGE[1], BLOCK_SIZE))
        random.shuffle(blocks)
        for first in blocks:
            lock = os.open(folder / str(first), os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o666)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                os.close(lock)
                continue
            if all(port_is_free(port) for port in range(first, first + BLOCK_SIZE)):
                return cls(first, lock)
            os.close(lock)
        raise Unsupported(f"no {BLOCK_SIZE} free ports in a row between {BLOCK_RANGE[0]} and {BLOCK_RANGE[1]}")

    def port(self, offset: int) -> int:
        """The port at `offset` of the block."""
        if not 0 <= offset < BLOCK_SIZE:
            raise ValueError(f"offset {offset} is outside 0..{BLOCK_SIZE - 1}")
        return self.first + offset

    def release(self) -> None:
        if self.lock >= 0:
            os.close(self.lock)
            self.lock = -1

    def __enter__(self) -> "PortBlock":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()


def port_is_free(port: int, host: str = "") -> bool:
    """Whether a listener could be opened on the port; on every interface when `host` is empty.

    gRPC servers share a port silently (SO_REUSEPORT), so a port that is taken has to be noticed before.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host, port))
        except OSError:
            return False
    return True


def become_subreaper() -> None:
    """From now on, orphans among this process's descendants become its children (Linux 3.4 and later)."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def marked_processes(mark: str) -> list[psutil.Process]:
    """Every other process that carries the mark in its environment; a zombie has none left."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.environ().get(MARK_VARIABLE) == mark:
                found.append(process)
        except psutil.Error:
            continue
    return found


def end_processes(processes: Iterable[psutil.Process], grace_s: float) -> None:
    """SIGTERM, then SIGKILL to what is left after `grace_s`; psutil never signals a process that took over a pid."""
    chosen = list(processes)
    for process in chosen:
        _signal(process.terminate)
    _, alive = psutil.wait_procs(chosen, timeout=grace_s)
    for process in alive:
        _signal(process.kill)
    psutil.wait_procs(alive, timeout=5.0)


def _signal(send: Callable[[], None]) -> None:
    with suppress(psutil.Error):
        send()
