"""Which pools there are, each with its keeper: pools join, and leave without a call being dropped."""

import asyncio

from deployments.router.health import HealthBoard
from deployments.router.keeper import Keeper
from deployments.router.metrics import Metrics
from deployments.router.pools import Pool, PoolSet
from deployments.router.quarantine import Quarantine
from deployments.router.sections import PoolTarget
from deployments.router.settings import RouterSettings


class Roster:
    """Owns the keepers, and the connections of pools that leave. Belongs to one event loop."""

    def __init__(
        self, pools: PoolSet, quarantine: Quarantine, board: HealthBoard, settings: RouterSettings, metrics: Metrics
    ) -> None:
        self._pools = pools
        self._quarantine = quarantine
        self._board = board
        self._settings = settings
        self._metrics = metrics
        self._keepers: dict[str, asyncio.Task[None]] = {}
        self._leaving: dict[asyncio.Task[None], Pool] = {}

    def start(self) -> None:
        """Begins to look after the pools of the settings."""
        for pool in self._pools.all:
            self._keep(pool)

    async def join(self, target: PoolTarget) -> None:
        """A new pool; it gets calls once it has passed its probes. Raises InvalidInput for its TLS files."""
        self._keep(self._pools.add(target))
        await self._board.publish()

    async def leave(self, name: str) -> None:
        """The pool gets no new calls; its connections close when those under way have ended."""
        pool = self._pools.remove(name)
        keeper = self._keepers.pop(name)
        keeper.cancel()
        await asyncio.gather(keeper, return_exceptions=True)
        self._quarantine.leave(pool)
        closing = asyncio.create_task(pool.close_when_idle())
        self._leaving[closing] = pool
        closing.add_done_callback(lambda done: self._leaving.pop(done, None))
        await self._board.publish()

    async def stop(self) -> None:
        """Ends keepers and connections; calls under way are cut off."""
        tasks = [*self._keepers.values(), *self._leaving]
        pools = [*self._pools.all, *self._leaving.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for pool in pools:
            await pool.close()

    def _keep(self, pool: Pool) -> None:
        self._quarantine.expect(pool)
        keeper = Keeper(pool, self._board, self._quarantine, self._settings.health, self._metrics)
        self._keepers[pool.name] = asyncio.create_task(keeper.run())
