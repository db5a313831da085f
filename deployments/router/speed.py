"""How fast a pool is, measured on what it does."""

import math

# A shorter window follows changes faster and is noisier.
WINDOW_S = 1.0
NEW_WINDOW_WEIGHT = 0.3


class Speed:
    """Items in flight at one pool, and its items per second over the time in which it had any.

    Idle time does not count, so a pool that is asked seldom is not taken for a slow one. Only answered items count, so
    a pool that fails fast is not taken for a fast one. All times are seconds of one monotonic clock.
    """

    def __init__(self, now: float) -> None:
        self.in_flight = 0
        # What the pool says of itself, for as long as nothing was measured; items per second.
        self.claimed: float | None = None
        self._measured: float | None = None
        self._window_start = now
        self._done = 0
        self._busy_s = 0.0
        self._busy_since: float | None = None

    def start(self, items: int, now: float) -> None:
        """`items` were sent to the pool."""
        self._close_window(now)
        if self.in_flight == 0:
            self._busy_since = now
        self.in_flight += items

    def finish(self, items: int, now: float, answered: bool) -> None:
        """The call with these `items` has ended."""
        self.in_flight -= items
        if answered:
            self._done += items
        if self.in_flight == 0 and self._busy_since is not None:
            self._busy_s += now - self._busy_since
            self._busy_since = None
        self._close_window(now)

    def items_per_second(self) -> float | None:
        """The moving average; the pool's own claim before anything was measured; None when there is neither."""
        if self._measured is not None:
            return self._measured
        if self._done and self._busy_s > 0:
            return self._done / self._busy_s
        return self.claimed

    def ceiling(self, now: float) -> float:
        """No pool that works at items_per_second would still have this much in flight: a hung pool shows at once.

        Items per second; infinite for an idle pool.
        """
        if self._busy_since is None:
            return math.inf
        busy_s = self._busy_s + (now - self._busy_since)
        return (self._done + self.in_flight) / busy_s if busy_s > 0 else math.inf

    def _close_window(self, now: float) -> None:
        if now - self._window_start < WINDOW_S:
            return
        busy_s = self._busy_s + (now - self._busy_since if self._busy_since is not None else 0.0)
        if self._done == 0 and self._busy_since is not None:
            return  # one long call: its window ends with it
        if self._done and busy_s > 0:
            sample = self._done / busy_s
            previous = self._measured
            self._measured = sample if previous is None else previous + NEW_WINDOW_WEIGHT * (sample - previous)
        self._window_start, self._done, self._busy_s = now, 0, 0.0
        if self._busy_since is not None:
            self._busy_since = now
