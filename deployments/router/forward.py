"""Sends one encoding request to a pool, and to another one when that fails in a way that another try may mend."""

import asyncio
import logging
import random

import grpc

from deployments.router.calls import Call
from deployments.router.envelope import Envelope, MalformedRequest, read_request
from deployments.router.failures import PoolFailure, RouterError, read_failure, refused
from deployments.router.logs import log_event
from deployments.router.metrics import Metrics
from deployments.router.pick import ITEM_WORDS, Refusal, Wanted, pick
from deployments.router.pools import Pool, PoolSet
from deployments.router.retries import RetryBudget, pause_s
from deployments.router.settings import RouterSettings
from encoder.settings import TowerName

logger = logging.getLogger(__name__)


class Forwarder:
    """Routes encoding requests. The request's bytes go on as they came, and the answer's come back as they are."""

    def __init__(self, pools: PoolSet, settings: RouterSettings, metrics: Metrics) -> None:
        self._pools = pools
        self._settings = settings
        self._metrics = metrics
        self._budget = RetryBudget(settings.retry)
        self._chance = random.Random()

    async def forward(self, tower: TowerName, request: bytes, call: Call) -> bytes:
        """Answers an EncodeImagesRequest (vision) or EncodeTextRequest (text); raises RouterError.

        An empty batch is INVALID_ARGUMENT: its answer would have to say which model and pool computed nothing.
        """
        try:
            envelope = read_request(request)
        except MalformedRequest as error:
            raise RouterError(grpc.StatusCode.INVALID_ARGUMENT, f"the request cannot be parsed: {error}") from None
        if envelope.items == 0:
            items = ITEM_WORDS[tower]
            raise RouterError(grpc.StatusCode.INVALID_ARGUMENT, f"the request has no {items}: send at least one")
        return await self.send(tower, request, envelope, call)

    async def send(self, tower: TowerName, request: bytes, envelope: Envelope, call: Call) -> bytes:
        """Sends `request` to the best pool, with retries within the deadline and the budget; raises RouterError."""
        call.items += envelope.items
        self._budget.earn()
        wanted = Wanted(tower, envelope.items, envelope.model, envelope.pool)
        failed: frozenset[str] = frozenset()
        failure: PoolFailure | None = None
        while True:
            pool = self._pick(wanted, failed)
            if isinstance(pool, Refusal):
                # After a failure the pools' state may have changed; what the pool said tells more.
                raise failure.error if failure is not None else refused(pool)
            remaining_s = call.remaining_s()
            call.pool, call.attempts = pool.name, call.attempts + 1
            try:
                response = await pool.encode(
                    tower, request, envelope.items, remaining_s, call.metadata_for(pool.name, remaining_s)
                )
            except grpc.aio.AioRpcError as error:
                failure = read_failure(error, pool.name, pool.address)
                self._note(failure, pool, call)
            else:
                self._metrics.pool_call(pool.name, "OK")
                return response
            failed |= {pool.name}
            await self._pause_before_retry(failure, pool, wanted, failed, call)

    def _pick(self, wanted: Wanted, failed: frozenset[str]) -> Pool | Refusal:
        asked = Wanted(wanted.tower, wanted.items, wanted.model, wanted.pool, failed)
        choice = pick(asked, self._pools.views(), self._settings.default_model)
        return choice if isinstance(choice, Refusal) else self._pools.by_name[choice]

    async def _pause_before_retry(
        self, failure: PoolFailure, pool: Pool, wanted: Wanted, failed: frozenset[str], call: Call
    ) -> None:
        """Waits for the next attempt, or raises the failure when there shall be none."""
        retry = self._settings.retry
        if not failure.retryable or call.attempts >= retry.attempts:
            raise failure.error
        # A pool's wish to be left alone for a while does not hold for the others.
        asked_s = failure.retry_after_s if self._pick(wanted, failed) is pool else 0.0
        pause = pause_s(retry, call.attempts, asked_s, self._chance)
        if pause >= call.remaining_s() or not self._budget.spend():
            raise failure.error
        self._metrics.retry(pool.name)
        await asyncio.sleep(pause)

    def _note(self, failure: PoolFailure, pool: Pool, call: Call) -> None:
        self._metrics.pool_call(pool.name, failure.error.code.name)
        if failure.doubtful:
            pool.doubted.set()
        level = logging.WARNING if failure.error.code is grpc.StatusCode.INTERNAL else logging.INFO
        log_event(
            logger,
            level,
            "pool_call_failed",
            {"pool": pool.name, "cause": failure.cause, "request_id": call.request_id, "attempt": call.attempts},
        )
