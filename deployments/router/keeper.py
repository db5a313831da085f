"""Keeps an eye on one pool: asks it what it serves, probes it with real forwards, and checks its golden vectors.

A pool that fails its probes is not picked until it passes them. A pool comes into force only after its golden vectors
were held against the fleet's.
"""

import asyncio
import logging
import random
import time
from typing import cast

import grpc

from deployments.router.failures import read_failure
from deployments.router.health import HealthBoard
from deployments.router.logs import log_event
from deployments.router.metrics import Metrics
from deployments.router.pools import Pool
from deployments.router.probe import probe
from deployments.router.quarantine import Quarantine
from deployments.router.sections import HealthSettings
from deployments.router.survey import PoolUnfit, take_inventory
from encoder.settings import TowerName

logger = logging.getLogger(__name__)

# Routers that start together shall not probe together for ever.
_JITTER = 0.1


class Keeper:
    """Asks, probes and checks one pool, for as long as `run` runs."""

    def __init__(
        self, pool: Pool, board: HealthBoard, quarantine: Quarantine, settings: HealthSettings, metrics: Metrics
    ) -> None:
        self._pool = pool
        self._board = board
        self._quarantine = quarantine
        self._settings = settings
        self._metrics = metrics
        self._failures = 0
        self._began = float("-inf")
        self._asked = float("-inf")
        self._probed = float("-inf")
        # Set from when the pool has changed until its golden vectors were looked at.
        self._unchecked = False
        self._chance = random.Random()

    async def run(self) -> None:
        """Goes on until it is cancelled."""
        pool = self._pool
        while True:
            doubted, changed = pool.doubted, pool.changed
            pool.doubted = pool.changed = False
            pool.alarm.clear()
            try:
                await self._round(doubted, changed)
            except Exception as error:  # a keeper that dies would leave its pool as it was for ever
                log_event(logger, logging.ERROR, "keeper_failed", {"pool": pool.name, "error": repr(error)}, trace=True)
            await self._rest()

    async def _round(self, doubted: bool, changed: bool) -> None:
        pool, started = self._pool, time.monotonic()
        self._began = started
        probing = doubted or self._probing_is_due(started)
        try:
            if changed or self._asking_is_due(started):
                await take_inventory(pool, self._settings.timeout_s)
                self._asked = started
            if probing:
                self._probed = started
                for tower in sorted(pool.towers or ()):
                    await probe(pool, cast(TowerName, tower), self._settings.timeout_s)
            self._unchecked |= changed
            checking = self._checking_is_due(started)
            if checking:
                await self._quarantine.check(pool)
                self._unchecked = False
        except (grpc.aio.AioRpcError, PoolUnfit) as error:
            self._quarantine.arrived(pool)
            await self._failed(error, started)
        else:
            self._quarantine.arrived(pool)
            if not pool.healthy:
                await self._quarantine.settled()
            if probing or checking:
                await self._passed()

    def _asking_is_due(self, now: float) -> bool:
        pool = self._pool
        return pool.models is None or not pool.healthy or now - self._asked >= self._settings.refresh_s

    def _checking_is_due(self, now: float) -> bool:
        """Whether the golden inputs shall be encoded: before the pool comes into force, and whenever it may differ."""
        pool, settings = self._pool, self._quarantine.settings
        if not settings.enabled:
            return False
        if not pool.healthy:
            return True
        since = now - self._quarantine.checked_at(pool)
        return since >= (settings.recheck_s if self._is_in_question() else settings.interval_s)

    def _is_in_question(self) -> bool:
        """Whether the golden vectors that the pool has shown may not be those it computes now."""
        return self._unchecked or bool(self._pool.quarantine) or not self._quarantine.knows(self._pool)

    def _probing_is_due(self, now: float) -> bool:
        """Whether traffic has not proven lately that the pool works."""
        pool, settings = self._pool, self._settings
        if not pool.healthy or self._failures or not settings.traffic_counts:
            return True
        proven = now - pool.last_embedding < settings.interval_s
        return not proven or now - self._probed >= settings.max_unprobed_s

    async def _passed(self) -> None:
        self._failures = 0
        self._metrics.probe(self._pool.name, "passed")
        if not self._pool.healthy:
            self._pool.healthy, self._pool.reason = True, ""
            log_event(logger, logging.INFO, "pool_healthy", {"pool": self._pool.name})
        await self._board.publish()

    async def _failed(self, error: grpc.aio.AioRpcError | PoolUnfit, started: float) -> None:
        pool = self._pool
        if isinstance(error, PoolUnfit):
            said = cause = str(error)
        else:
            if error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED:
                # Busy is not broken. A pool that was down stays down until it answers.
                self._metrics.probe(pool.name, "busy")
                return
            if error.code() is grpc.StatusCode.DEADLINE_EXCEEDED and pool.last_embedding > started:
                # The probe waited behind traffic that the pool does serve.
                self._metrics.probe(pool.name, "busy")
                return
            failure = read_failure(error, pool.name, pool.address)
            said, cause = failure.error.message, failure.cause
        self._failures += 1
        self._metrics.probe(pool.name, "failed")
        # It may serve another model since it was asked last.
        self._asked = float("-inf")
        if not pool.healthy:
            if pool.reason != said:
                pool.reason = said
                log_event(logger, logging.WARNING, "pool_not_healthy", {"pool": pool.name, "cause": cause})
        elif self._failures >= self._settings.failures:
            pool.healthy, pool.reason = False, said
            log_event(logger, logging.WARNING, "pool_down", {"pool": pool.name, "cause": cause})
        await self._board.publish()

    async def _rest(self) -> None:
        """Waits for the next round: short when the pool is in doubt, and cut short when a call doubts it."""
        pool, settings = self._pool, self._settings
        if not pool.healthy or self._failures:
            await asyncio.sleep(min(settings.recheck_s, settings.interval_s))
            return
        agreement = self._quarantine.settings
        pause = settings.interval_s
        if agreement.enabled and self._is_in_question():
            pause = min(pause, agreement.recheck_s)
        try:
            async with asyncio.timeout(pause * self._chance.uniform(1.0 - _JITTER, 1.0 + _JITTER)):
                await pool.alarm.wait()
        except TimeoutError:
            return
        # However many calls raise the alarm, the pool is not looked at more often than this.
        await asyncio.sleep(max(0.0, self._began + settings.recheck_s - time.monotonic()))
