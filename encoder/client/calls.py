"""Blocking calls in flight that can be ended together."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import CancelledError
from typing import Protocol, TypeVar

R_co = TypeVar("R_co", covariant=True)
R = TypeVar("R")


class PendingCall(Protocol[R_co]):
    """What a grpc stub's `.future(...)` returns, as far as it is used here."""

    def result(self) -> R_co: ...

    def cancel(self) -> bool: ...


class CallGroup:
    """Runs calls and pauses of several threads until `cancel`, which ends them all with CancelledError."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cancelled = threading.Event()
        self._pending: set[PendingCall[object]] = set()

    def run(self, start: Callable[[], PendingCall[R]]) -> R:
        """The result of the call that `start` begins; raises what the call raises."""
        with self._lock:
            if self._cancelled.is_set():
                raise CancelledError
            call = start()
            self._pending.add(call)
        try:
            return call.result()
        except BaseException:
            # Without effect on a call that has ended by itself; ends it after a KeyboardInterrupt.
            call.cancel()
            raise
        finally:
            with self._lock:
                self._pending.discard(call)

    def pause(self, seconds: float) -> None:
        if self._cancelled.wait(seconds):
            raise CancelledError

    def cancel(self) -> None:
        with self._lock:
            self._cancelled.set()
            pending = tuple(self._pending)
        for call in pending:
            call.cancel()
