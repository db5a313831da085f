"""One call to one pool, and what is learned from how it ends."""

import asyncio
import logging
import time
from dataclasses import dataclass

import grpc

from deployments.router.calls import Call
from deployments.router.envelope import read_provenance
from deployments.router.failures import PoolFailure, RouterError, read_failure
from deployments.router.logs import log_event
from deployments.router.metrics import Metrics
from deployments.router.pools import Pool
from deployments.router.quarantine import Quarantine
from encoder.settings import TowerName

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Load:
    """What is sent: `request` with `items` items; `pinned` when the caller named the pool."""

    tower: TowerName
    request: bytes
    items: int
    pinned: bool


class AttemptFailed(Exception):
    """A call to `pool` that brought no answer to pass on."""

    def __init__(self, pool: Pool, failure: PoolFailure) -> None:
        super().__init__(failure.cause)
        self.pool = pool
        self.failure = failure


class Attempts:
    """Makes calls to pools, and tells metrics, ejection, quarantine and keepers how they went."""

    def __init__(self, quarantine: Quarantine, metrics: Metrics) -> None:
        self._quarantine = quarantine
        self._metrics = metrics

    async def make(self, pool: Pool, load: Load, call: Call) -> bytes:
        """The pool's answer. Raises AttemptFailed, and RouterError when the deadline has passed."""
        remaining_s = call.remaining_s()
        call.pool, call.attempts = pool.name, call.attempts + 1
        started = time.monotonic()
        metadata = call.metadata_for(pool.name, remaining_s)
        try:
            response = await pool.encode(load.tower, load.request, load.items, remaining_s, metadata)
        except asyncio.CancelledError:
            self._given_up(pool, time.monotonic() - started)
            raise
        except grpc.aio.AioRpcError as error:
            failure = read_failure(error, pool.name, pool.address)
            self._failed(pool, failure, call, time.monotonic() - started)
            raise AttemptFailed(pool, failure) from None
        source = read_provenance(response)
        foreign = self._quarantine.vet(pool, load.tower, source)
        if foreign:
            failure = _foreign(pool.name, foreign, load.pinned)
            self._failed(pool, failure, call, time.monotonic() - started)
            raise AttemptFailed(pool, failure)
        self._succeeded(pool, time.monotonic() - started, source.fallback)
        call.pool = pool.name
        return response

    def _succeeded(self, pool: Pool, seconds: float, fallback: bool) -> None:
        self._metrics.pool_call(pool.name, grpc.StatusCode.OK.name, seconds)
        if fallback:
            self._metrics.fallback(pool.name)
        self._note_ejection(pool, pool.ejection.record(False, seconds, time.monotonic()))

    def _given_up(self, pool: Pool, seconds: float) -> None:
        self._metrics.pool_call(pool.name, grpc.StatusCode.CANCELLED.name, seconds)
        self._note_ejection(pool, pool.ejection.record_given_up(seconds, time.monotonic()))

    def _failed(self, pool: Pool, failure: PoolFailure, call: Call, seconds: float) -> None:
        code = failure.error.code
        self._metrics.pool_call(pool.name, code.name, seconds)
        if failure.doubtful:
            pool.doubt()
        # A deadline may have been too short: it speaks against the pool only when the call was slow.
        failed = failure.doubtful and code is not grpc.StatusCode.DEADLINE_EXCEEDED
        self._note_ejection(pool, pool.ejection.record(failed, seconds, time.monotonic()))
        level = logging.WARNING if code is grpc.StatusCode.INTERNAL else logging.INFO
        fields = {"pool": pool.name, "cause": failure.cause, "request_id": call.request_id, "attempt": call.attempts}
        log_event(logger, level, "pool_call_failed", fields)

    def _note_ejection(self, pool: Pool, ejected: bool) -> None:
        if ejected:
            self._metrics.ejection(pool.name)
            fields = {"pool": pool.name, "reason": pool.ejection.reason}
            log_event(logger, logging.WARNING, "pool_ejected", fields)


def _foreign(pool: str, reason: str, pinned: bool) -> PoolFailure:
    """The pool answered, but its vectors do not belong to the fleet's."""
    code = grpc.StatusCode.FAILED_PRECONDITION if pinned else grpc.StatusCode.UNAVAILABLE
    message = f"pool {pool!r} is in quarantine, {reason}: choose another pool, or none"
    return PoolFailure(
        RouterError(code, message), retryable=not pinned, doubtful=False, died=False, retry_after_s=0.0, cause=message
    )
