"""Leaves a pool out for a while when calls to it fail, even if its probes pass; then lets it try again."""

from deployments.router.sections import EjectionSettings


class Ejection:
    """Of one pool. Times are seconds of one monotonic clock.

    After an ejection the pool is on trial: one call that succeeds ends it, one that fails ejects it again, for twice as
    long. A pool that stays in for as long as it was out starts anew.
    """

    def __init__(self, settings: EjectionSettings) -> None:
        self._settings = settings
        self._in_a_row = 0
        self._window_start = float("-inf")
        self._calls = 0
        self._failed = 0
        self._times = 0
        self._until = float("-inf")
        self._on_trial = False
        self.reason = ""

    def is_out(self, now: float) -> bool:
        return now < self._until

    def record(self, failed: bool, seconds: float, now: float) -> bool:
        """Notes a call that ended now after `seconds`; True when it ejects the pool.

        What was sent before an ejection and ends during it tells nothing new.
        """
        if self.is_out(now):
            return False
        settings = self._settings
        if settings.slow_s is not None and seconds > settings.slow_s:
            failed = True
        if now - self._window_start >= settings.window_s:
            self._window_start, self._calls, self._failed = now, 0, 0
        self._calls += 1
        self._failed += failed
        self._in_a_row = self._in_a_row + 1 if failed else 0
        if not failed:
            self._on_trial = False
            return False
        why = self._verdict()
        if why:
            self._eject(why, now)
        return bool(why)

    def record_given_up(self, seconds: float, now: float) -> bool:
        """Notes a call that was cancelled after `seconds`: it tells something only when that was slow."""
        slow_s = self._settings.slow_s
        return slow_s is not None and seconds > slow_s and self.record(True, seconds, now)

    def _verdict(self) -> str:
        settings = self._settings
        if self._on_trial:
            return "its first call after an ejection failed"
        if self._in_a_row >= settings.consecutive_failures:
            return f"{self._in_a_row} calls in a row failed"
        if self._calls >= settings.min_calls and self._failed >= settings.error_rate * self._calls:
            return f"{self._failed} of {self._calls} calls failed"
        return ""

    def _eject(self, why: str, now: float) -> None:
        if now - self._until > self._length(self._times):
            self._times = 0
        self._times += 1
        length = self._length(self._times)
        self._until = now + length
        self._on_trial = True
        self._in_a_row = 0
        self._window_start = float("-inf")
        self.reason = f"left out for {length:g} s: {why}"

    def _length(self, times: int) -> float:
        # Bounded, so that the power stays a number.
        return min(self._settings.max_s, self._settings.base_s * 2.0 ** min(times - 1, 64)) if times else 0.0
