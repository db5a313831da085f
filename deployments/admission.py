"""Room for work in one replica: items and bytes that were admitted and are not answered yet."""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

from encoder.errors import Overloaded


@dataclass(frozen=True)
class _Waiter:
    items: int
    size: int
    admitted: asyncio.Future[None]


class Room:
    """Bounds what one replica holds. Belongs to one event loop.

    A unary call takes its room at once or fails; an item of a stream waits for room, in order, so that its client slows
    down instead of failing.
    """

    def __init__(self, max_items: int, max_bytes: int) -> None:
        self._max_items = max_items
        self._max_bytes = max_bytes
        self._items = 0
        self._bytes = 0
        self._waiters: deque[_Waiter] = deque()

    @property
    def items(self) -> int:
        """Items inside now."""
        return self._items

    @property
    def bytes(self) -> int:
        """Bytes inside now: of requests, and of answers that hold features."""
        return self._bytes

    @contextmanager
    def hold(self, items: int, size: int) -> Iterator[None]:
        """Room for `items` items of `size` bytes in all; raises Overloaded when there is none now."""
        if not self._fits(items, size):
            raise Overloaded(
                f"{self._items} items ({self._bytes} bytes) are under way and {items} more do not fit into "
                f"{self._max_items} items and {self._max_bytes} bytes: try again later"
            )
        self._take(items, size)
        try:
            yield
        finally:
            self._give_back(items, size)

    @contextmanager
    def hold_answer(self, items: int, size: int) -> Iterator[None]:
        """Room for the `size` bytes of the answer to `items` that are inside; raises Overloaded when there is none.

        Whoever is alone gets it.
        """
        if self._items > items and self._bytes + size > self._max_bytes:
            raise Overloaded(
                f"{self._bytes} bytes are under way and an answer of {size} does not fit into {self._max_bytes} beside "
                "them: try again later"
            )
        self._take(0, size)
        try:
            yield
        finally:
            self._give_back(0, size)

    @asynccontextmanager
    async def hold_when_free(self, items: int, size: int) -> AsyncIterator[None]:
        """As `hold`, but waits for room, first come first served."""
        if self._waiters or not self._fits(items, size):
            waiter = _Waiter(items, size, asyncio.get_running_loop().create_future())
            self._waiters.append(waiter)
            try:
                await waiter.admitted
            except asyncio.CancelledError:
                if not waiter.admitted.cancelled():  # admitted and cancelled in the same turn of the loop
                    self._give_back(items, size)
                self._admit()
                raise
        else:
            self._take(items, size)
        try:
            yield
        finally:
            self._give_back(items, size)

    def _fits(self, items: int, size: int) -> bool:
        # Whatever fits into no room at all still gets through when it is alone.
        if self._items == 0:
            return True
        return self._items + items <= self._max_items and self._bytes + size <= self._max_bytes

    def _take(self, items: int, size: int) -> None:
        self._items += items
        self._bytes += size

    def _give_back(self, items: int, size: int) -> None:
        self._items -= items
        self._bytes -= size
        self._admit()

    def _admit(self) -> None:
        while self._waiters:
            first = self._waiters[0]
            if not first.admitted.cancelled():
                if not self._fits(first.items, first.size):
                    return
                self._take(first.items, first.size)
                first.admitted.set_result(None)
            self._waiters.popleft()
