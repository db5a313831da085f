"""Counts the calls under way, and closes when the router drains."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc

from deployments.router.failures import RouterError


class Gate:
    """Belongs to one event loop."""

    def __init__(self) -> None:
        # Set when no new call is taken any more.
        self.closed = asyncio.Event()
        self._inside = 0
        self._empty = asyncio.Event()
        self._empty.set()

    @contextmanager
    def enter(self) -> Iterator[None]:
        """Raises UNAVAILABLE when the gate is closed."""
        if self.closed.is_set():
            raise draining()
        self._inside += 1
        self._empty.clear()
        try:
            yield
        finally:
            self._inside -= 1
            if self._inside == 0:
                self._empty.set()

    def close(self) -> None:
        self.closed.set()

    async def wait_empty(self, grace_s: float) -> int:
        """Waits at most `grace_s` for the calls under way; returns how many are left."""
        try:
            async with asyncio.timeout(grace_s):
                await self._empty.wait()
        except TimeoutError:
            pass
        return self._inside


def draining() -> RouterError:
    return RouterError(grpc.StatusCode.UNAVAILABLE, "this router is shutting down: connect again to reach another one")
