"""Requests that replicas died of: not sent a third time, and for a while not at all."""

import hashlib
import time
from collections import OrderedDict

import grpc

from deployments.router.failures import RouterError, with_retry_delay

# So many replicas may die under one request.
MAX_DEATHS = 2
# Requests remembered at most; the oldest go first.
_CAPACITY = 256


class PoisonLog:
    """Remembers requests by size and digest, for `memory_s` each."""

    def __init__(self, memory_s: float) -> None:
        self._memory_s = memory_s
        # Size and digest → time until which it is refused; the soonest first.
        self._until: OrderedDict[tuple[int, bytes], float] = OrderedDict()

    def remember(self, request: bytes) -> None:
        """Replicas died of it."""
        key = (len(request), _digest(request))
        self._until[key] = time.monotonic() + self._memory_s
        self._until.move_to_end(key)
        while len(self._until) > _CAPACITY:
            self._until.popitem(last=False)

    def refused_for_s(self, request: bytes) -> float:
        """How long the request is refused yet; 0 for one that is not."""
        now = time.monotonic()
        while self._until and next(iter(self._until.values())) <= now:
            self._until.popitem(last=False)
        # Most requests are told apart by their size, without a digest.
        if not any(size == len(request) for size, _ in self._until):
            return 0.0
        return max(0.0, self._until.get((len(request), _digest(request)), now) - now)


def deadly(refused_s: float) -> RouterError:
    """What the client is told of such a request."""
    code = grpc.StatusCode.UNAVAILABLE
    message = (
        f"{MAX_DEATHS} replicas died while they worked on this request, so it is not sent again: look at what is in "
        "it, and at the log of the pool"
    )
    return RouterError(code, message, with_retry_delay(code, message, refused_s) if refused_s > 0 else None)


def _digest(request: bytes) -> bytes:
    return hashlib.blake2b(request, digest_size=16).digest()
