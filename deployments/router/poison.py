"""Requests that replicas died of: not sent a third time, and for a while not at all."""

import hashlib
import time
from collections import OrderedDict
from dataclasses import dataclass

import grpc

from deployments.router.failures import RouterError, with_retry_delay

# So many replicas may die under one request.
MAX_DEATHS = 2
# A request is refused no longer than this, and forgotten so long after.
_LONGEST_S = 600.0
# Requests remembered at most; those that were deadly longest ago go first.
_CAPACITY = 256

Key = tuple[int, bytes]


@dataclass(frozen=True, slots=True)
class _Record:
    times: int
    until: float


class PoisonLog:
    """Remembers requests by size and digest: refused for `first_s`, and twice as long each time it happens again.

    What looks like a death may have been a pool that was restarted under an innocent request, so the first time is
    short; a request that does kill costs two replicas less and less often.
    """

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s
        self._records: OrderedDict[Key, _Record] = OrderedDict()

    def remember(self, request: bytes) -> float:
        """Replicas died of it; returns for how many seconds it is refused now."""
        if self._first_s <= 0:
            return 0.0
        key = (len(request), _digest(request))
        known = self._records.get(key)
        times = known.times + 1 if known is not None else 1
        refused_s = min(_LONGEST_S, self._first_s * 2.0 ** min(times - 1, 64))
        self._records[key] = _Record(times, time.monotonic() + refused_s)
        self._records.move_to_end(key)
        while len(self._records) > _CAPACITY:
            self._records.popitem(last=False)
        return refused_s

    def refused_for_s(self, request: bytes) -> float:
        """How long the request is refused yet; 0 for one that is not."""
        # Most requests are told apart by their size, without a digest.
        if not any(size == len(request) for size, _ in self._records):
            return 0.0
        now = time.monotonic()
        key = (len(request), _digest(request))
        record = self._records.get(key)
        if record is None:
            return 0.0
        if now >= record.until + _LONGEST_S:
            del self._records[key]
        return max(0.0, record.until - now)


def deadly(refused_s: float) -> RouterError:
    """What the client is told of such a request."""
    code = grpc.StatusCode.UNAVAILABLE
    message = (
        f"{MAX_DEATHS} replicas were lost while they worked on this request, so it is not sent again for now: look at "
        "what is in it, and at the log of the pool"
    )
    return RouterError(code, message, with_retry_delay(code, message, refused_s) if refused_s > 0 else None)


def _digest(request: bytes) -> bytes:
    return hashlib.blake2b(request, digest_size=16).digest()
