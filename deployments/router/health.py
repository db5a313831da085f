"""Keeps an eye on the pools, and tells it through grpc.health.v1.

Each pool has a keeper that asks it what it serves and probes it with a real forward. A pool that fails is not picked
and is NOT_SERVING until it succeeds. The router as a whole ("" and the service's name) is SERVING when every tower that
is known, from the settings or from a pool's own answer, has a healthy pool.
"""

import asyncio
import logging
import random
import time
from typing import cast

import grpc
from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio

from deployments.router.discover import PoolUnfit, discover
from deployments.router.failures import read_failure
from deployments.router.logs import log_event
from deployments.router.metrics import Metrics
from deployments.router.pools import SERVICE, Pool, PoolSet
from deployments.router.probe import probe
from deployments.router.settings import HealthSettings
from encoder.settings import TowerName

logger = logging.getLogger(__name__)

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
# Routers that start together shall not probe together for ever.
_JITTER = 0.1


class HealthBoard:
    """What grpc.health.v1 answers."""

    def __init__(self, pools: PoolSet) -> None:
        self.servicer = health_aio.HealthServicer()
        self._pools = pools
        self._overall = False

    async def publish(self) -> None:
        """Tells how the pools stand now, to those who ask and to those who watch."""
        for pool in self._pools.all:
            await self.servicer.set(pool.name, _SERVING if pool.healthy else _NOT_SERVING)
        known = {tower for pool in self._pools.all for tower in pool.towers or ()}
        served = {tower for pool in self._pools.all if pool.healthy for tower in pool.towers or ()}
        overall = bool(known) and known == served
        for service in ("", SERVICE):
            await self.servicer.set(service, _SERVING if overall else _NOT_SERVING)
        if overall != self._overall:
            self._overall = overall
            level = logging.INFO if overall else logging.WARNING
            log_event(
                logger, level, "serving" if overall else "not_serving", {"towers_without_pool": sorted(known - served)}
            )

    async def drain(self) -> None:
        """NOT_SERVING for everything, for good."""
        await self.servicer.enter_graceful_shutdown()


class Keeper:
    """Asks and probes one pool, for as long as `run` runs."""

    def __init__(self, pool: Pool, board: HealthBoard, settings: HealthSettings, metrics: Metrics) -> None:
        self._pool = pool
        self._board = board
        self._settings = settings
        self._metrics = metrics
        self._failures = 0
        self._asked = float("-inf")
        self._probed = float("-inf")
        self._chance = random.Random()

    async def run(self) -> None:
        """Goes on until it is cancelled."""
        pool = self._pool
        while True:
            doubted = pool.doubted.is_set()
            pool.doubted.clear()
            try:
                await self._round(doubted)
            except Exception as error:  # a keeper that dies would leave its pool as it was for ever
                log_event(logger, logging.ERROR, "keeper_failed", {"pool": pool.name, "error": repr(error)}, trace=True)
            await self._rest()

    async def _round(self, doubted: bool) -> None:
        started = time.monotonic()
        ask = self._asking_is_due(started)
        check = doubted or self._probing_is_due(started)
        try:
            if ask:
                await discover(self._pool, self._settings.timeout_s)
                self._asked = started
            if check:
                self._probed = started
                for tower in sorted(self._pool.towers or ()):
                    await probe(self._pool, cast(TowerName, tower), self._settings.timeout_s)
        except (grpc.aio.AioRpcError, PoolUnfit) as error:
            await self._failed(error, started)
        else:
            if check:
                await self._passed()

    def _asking_is_due(self, now: float) -> bool:
        pool = self._pool
        return pool.models is None or not pool.healthy or now - self._asked >= self._settings.refresh_s

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
        pause = settings.interval_s * self._chance.uniform(1.0 - _JITTER, 1.0 + _JITTER)
        try:
            async with asyncio.timeout(pause):
                await pool.doubted.wait()
        except TimeoutError:
            return
        # However many calls fail, the pool is not probed more often than this.
        await asyncio.sleep(max(0.0, self._probed + settings.recheck_s - time.monotonic()))
