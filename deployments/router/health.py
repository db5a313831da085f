"""What grpc.health.v1 answers.

A pool is SERVING when its probes pass and its vectors belong to the fleet's. The router as a whole ("" and the
service's name) is SERVING when every tower that is known, from the settings or from a pool's own answer, has such a
pool.
"""

import logging

from grpc_health.v1 import health_pb2
from grpc_health.v1.health import aio as health_aio

from deployments.router.logs import log_event
from deployments.router.pools import SERVICE, PoolSet

logger = logging.getLogger(__name__)

_SERVING = health_pb2.HealthCheckResponse.SERVING
_NOT_SERVING = health_pb2.HealthCheckResponse.NOT_SERVING
_UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN


class HealthBoard:
    """Told again whenever something may have changed."""

    def __init__(self, pools: PoolSet) -> None:
        self.servicer = health_aio.HealthServicer()
        self._pools = pools
        self._told: set[str] = set()
        self._overall = False

    async def publish(self) -> None:
        """Tells how the pools stand now, to those who ask and to those who watch."""
        pools = self._pools.all
        for pool in pools:
            await self.servicer.set(pool.name, _SERVING if pool.in_force else _NOT_SERVING)
        names = {pool.name for pool in pools}
        for gone in self._told - names:
            await self.servicer.set(gone, _UNKNOWN)
        self._told = names
        known = {tower for pool in pools for tower in pool.towers or ()}
        served = {tower for pool in pools if pool.in_force for tower in pool.towers or ()}
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
