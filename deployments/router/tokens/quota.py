"""What one token may still do: token buckets for calls and items, and a bound on what is under way.

A unary call beyond its limits is refused. An item of a stream waits for its turn instead, since a stream is read no
faster than it is served. Belongs to one event loop.
"""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager

import grpc

from deployments.router.failures import RouterError, with_retry_delay
from deployments.router.tokens.entries import TokenEntry

# When a call under way will end is not known.
IN_FLIGHT_RETRY_S = 0.25
# A little below one, so that rounding never refuses what is due.
_ONE = 1.0 - 1e-9
Clock = Callable[[], float]


class TokenRefusal(RouterError):
    """A call that its token, or the lack of one, does not allow; `token` is a name, or empty."""

    def __init__(self, code: grpc.StatusCode, message: str, reason: str, token: str, retry_s: float = 0.0) -> None:
        status = with_retry_delay(code, message, retry_s) if retry_s > 0 else None
        super().__init__(code, message, status)
        self.reason = reason
        self.token = token


class Bucket:
    """Fills with `rate` a second up to `size`; starts full. It may be overdrawn: then it fills from below zero."""

    def __init__(self, rate: float, size: float, now: float) -> None:
        self.rate = rate
        self.size = size
        self._level = size
        self._filled = now

    def take(self, amount: float, now: float, least: float) -> float:
        """Takes `amount` when there is at least `least`; returns the seconds until there will be, 0 when taken."""
        self._fill(now)
        if self._level < least:
            return (least - self._level) / self.rate
        self._level -= amount
        return 0.0

    def reserve(self, amount: float, now: float) -> float:
        """Takes `amount` in any case; returns the seconds until it is there."""
        self._fill(now)
        self._level -= amount
        return max(0.0, -self._level / self.rate)

    def resize(self, rate: float, size: float, now: float) -> None:
        """New limits; what is in it stays, up to the new size."""
        self._fill(now)
        self.rate, self.size = rate, size
        self._level = min(self._level, size)

    def _fill(self, now: float) -> None:
        self._level = min(self.size, self._level + (now - self._filled) * self.rate)
        self._filled = now


class Quota:
    """The state of one entry; without an entry nothing is limited."""

    def __init__(self, entry: TokenEntry | None = None, clock: Clock = time.monotonic) -> None:
        self.entry = entry
        self.name = entry.name if entry is not None else ""
        self._clock = clock
        self._calls: Bucket | None = None
        self._items: Bucket | None = None
        self._in_flight = 0
        self._streams = 0
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.update(entry)

    def update(self, entry: TokenEntry | None) -> None:
        """The limits of a new entry of the same name; what is under way and what was spent stays."""
        self.entry = entry
        now = self._clock()
        calls_rate = entry.requests_per_second if entry is not None else None
        items_rate = entry.max_items_per_second if entry is not None else None
        self._calls = _bucket(self._calls, calls_rate, entry.burst if entry is not None else 0.0, now)
        # A second's worth at once; a larger batch is let through, and paid off before the next one.
        self._items = _bucket(self._items, items_rate, max(1.0, items_rate or 0.0), now)
        self._wake()

    @contextmanager
    def call(self) -> Iterator[None]:
        """Around a unary call; raises TokenRefusal."""
        self._check_in_flight(self._in_flight, "calls")
        self._spend_call()
        self._in_flight += 1
        try:
            yield
        finally:
            self._leave()

    @contextmanager
    def stream(self) -> Iterator[None]:
        """Around a stream; its items come on top, each with `turn`. Raises TokenRefusal."""
        self._check_in_flight(self._streams, "streams")
        self._spend_call()
        self._streams += 1
        try:
            yield
        finally:
            self._streams -= 1

    @asynccontextmanager
    async def turn(self) -> AsyncIterator[None]:
        """Around one item of a stream: waits until it may go."""
        now = self._clock()
        wait = max((bucket.reserve(1.0, now) for bucket in (self._calls, self._items) if bucket), default=0.0)
        if wait:
            await asyncio.sleep(wait)
        await self._enter()
        try:
            yield
        finally:
            self._leave()

    def spend_items(self, items: int) -> None:
        """The items of a unary call; raises TokenRefusal while earlier ones are not paid off."""
        if self._items is None:
            return
        wait = self._items.take(items, self._clock(), least=_ONE)
        if wait:
            raise self._exhausted("items", f"more than {self._items.rate:g} items a second", wait)

    def _spend_call(self) -> None:
        if self._calls is None:
            return
        wait = self._calls.take(1.0, self._clock(), least=_ONE)
        if wait:
            raise self._exhausted("rate", f"more than {self._calls.rate:g} calls a second", wait)

    def _check_in_flight(self, under_way: int, what: str) -> None:
        if self.entry is not None and under_way >= self.entry.max_in_flight:
            raise self._exhausted("in_flight", f"{self.entry.max_in_flight} {what} under way", IN_FLIGHT_RETRY_S)

    def _exhausted(self, reason: str, said: str, wait_s: float) -> TokenRefusal:
        message = f"token {self.name!r} has {said}, its limit: try again in {wait_s:.3g} s, or ask for more"
        return TokenRefusal(grpc.StatusCode.RESOURCE_EXHAUSTED, message, reason, self.name, wait_s)

    async def _enter(self) -> None:
        while self.entry is not None and self._in_flight >= self.entry.max_in_flight:
            turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            try:
                await turn
            except asyncio.CancelledError:
                if not turn.cancelled():  # it was this one's turn: it goes to the next
                    self._wake()
                raise
        self._in_flight += 1

    def _leave(self) -> None:
        self._in_flight -= 1
        self._wake()

    def _wake(self) -> None:
        free = self.entry.max_in_flight - self._in_flight if self.entry is not None else len(self._waiting)
        while self._waiting and free > 0:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                free -= 1


def _bucket(former: Bucket | None, rate: float | None, size: float, now: float) -> Bucket | None:
    if rate is None:
        return None
    if former is None:
        return Bucket(rate, size, now)
    former.resize(rate, size, now)
    return former
