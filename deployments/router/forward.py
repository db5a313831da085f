"""Sends one encoding request to a pool, and to another one when that fails in a way that another try may mend."""

import asyncio
import random
from dataclasses import replace

import grpc

from deployments.router.attempts import AttemptFailed, Attempts, Load
from deployments.router.calls import Call
from deployments.router.envelope import Envelope, MalformedRequest, read_request
from deployments.router.failures import PoolFailure, RouterError, refused
from deployments.router.hedge import hedge_after_s, race
from deployments.router.metrics import Metrics
from deployments.router.pick import ITEM_WORDS, Refusal, Rules, Wanted, pick
from deployments.router.poison import MAX_DEATHS, PoisonLog, deadly
from deployments.router.pools import Pool, PoolSet
from deployments.router.quarantine import Quarantine
from deployments.router.retries import RetryBudget, pause_s
from deployments.router.settings import RouterSettings
from encoder.settings import TowerName


class Forwarder:
    """Routes encoding requests. The request's bytes go on as they came, and the answer's come back as they are."""

    def __init__(self, pools: PoolSet, quarantine: Quarantine, settings: RouterSettings, metrics: Metrics) -> None:
        self._pools = pools
        self._settings = settings
        self._metrics = metrics
        self._attempts = Attempts(quarantine, metrics)
        self._rules = Rules(settings.default_model, settings.masks, growing=settings.discovery is not None)
        self._budget = RetryBudget(settings.retry)
        self._poison = PoisonLog(settings.retry.poison_s)
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
        call.quota.spend_items(envelope.items)
        return await self.send(tower, request, envelope, call)

    async def send(self, tower: TowerName, request: bytes, envelope: Envelope, call: Call) -> bytes:
        """Sends `request` to the best pool, with retries within the deadline and the budget; raises RouterError."""
        call.items += envelope.items
        self._refuse_poison(request)
        self._budget.earn()
        wanted = Wanted(tower, envelope.items, envelope.model, envelope.pool)
        load = Load(tower, request, envelope.items, pinned=bool(envelope.pool))
        failure: PoolFailure | None = None
        deaths = 0
        while True:
            pool = self._pick(wanted)
            if isinstance(pool, Refusal):
                # After a failure the pools' state may have changed; what the pool said tells more.
                raise failure.error if failure is not None else refused(pool)
            outcome = await self._ask(pool, wanted, load, call, may_hedge=deaths == 0)
            if isinstance(outcome, bytes):
                return outcome
            # Of a hedged request's two failures, one that no other try mends counts.
            last = next((failed for failed in outcome if not failed.failure.retryable), outcome[-1])
            failure = last.failure
            deaths += sum(failed.failure.died for failed in outcome)
            if deaths >= MAX_DEATHS:
                self._metrics.poisoned("found")
                raise deadly(self._poison.remember(request))
            wanted = replace(wanted, avoid=wanted.avoid | {failed.pool.name for failed in outcome})
            await self._pause_before_retry(failure, last.pool, wanted, call)

    async def _ask(
        self, pool: Pool, wanted: Wanted, load: Load, call: Call, may_hedge: bool
    ) -> bytes | list[AttemptFailed]:
        after_s = hedge_after_s(self._settings.hedge, call.hedge_after_s) if may_hedge else None
        if after_s is None:
            try:
                return await self._attempts.make(pool, load, call)
            except AttemptFailed as failed:
                return [failed]

        def second() -> Pool | None:
            other = self._pick(replace(wanted, avoid=wanted.avoid | {pool.name}))
            if isinstance(other, Refusal) or call.attempts >= self._settings.retry.attempts:
                return None
            return other if self._budget.spend() else None

        return await race(pool, second, lambda one: self._attempts.make(one, load, call), after_s, self._metrics)

    def _refuse_poison(self, request: bytes) -> None:
        refused_s = self._poison.refused_for_s(request)
        if refused_s > 0:
            self._metrics.poisoned("again")
            raise deadly(refused_s)

    def _pick(self, wanted: Wanted) -> Pool | Refusal:
        choice = pick(wanted, self._pools.views(), self._rules)
        return choice if isinstance(choice, Refusal) else self._pools.by_name[choice]

    async def _pause_before_retry(self, failure: PoolFailure, pool: Pool, wanted: Wanted, call: Call) -> None:
        """Waits for the next attempt, or raises the failure when there shall be none."""
        retry = self._settings.retry
        if not failure.retryable or call.attempts >= retry.attempts:
            raise failure.error
        # A pool's wish to be left alone for a while does not hold for the others.
        asked_s = failure.retry_after_s if self._pick(wanted) is pool else 0.0
        pause = pause_s(retry, call.attempts, asked_s, self._chance)
        if pause >= call.remaining_s() or not self._budget.spend():
            raise failure.error
        self._metrics.retry(pool.name)
        await asyncio.sleep(pause)
