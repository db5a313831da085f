"""Finds pools by asking Ray Serve for its applications: new ones join, and those that are gone leave.

`/ray.serve.RayServeAPIService/ListApplications` answers the names of all applications, `repeated string
application_names = 1` (Ray 2.60). Serve's stock proxy answers it, and in HAProxy mode HAProxy passes it on to the
fallback proxy on the head node, whatever the `application` metadata says; without that proxy it is UNAVAILABLE. A
replica that is asked directly names only its own application, so `address` must be the proxy's.

An answer that fails changes nothing.
"""

import asyncio
import logging
import re
from collections import Counter

import grpc

from deployments.router.envelope import MalformedRequest, strings_of
from deployments.router.logs import log_event
from deployments.router.pools import PoolSet, open_channel
from deployments.router.roster import Roster
from deployments.router.sections import POOL_NAME, DiscoverySettings, PoolTarget
from deployments.router.settings import RouterSettings

logger = logging.getLogger(__name__)
LIST_APPLICATIONS = "/ray.serve.RayServeAPIService/ListApplications"
_APPLICATION_NAMES = 1
_POOL_NAME = re.compile(POOL_NAME)


class Discovery:
    """Follows Serve's applications, for as long as `run` runs."""

    def __init__(self, discovery: DiscoverySettings, settings: RouterSettings, pools: PoolSet, roster: Roster) -> None:
        """Raises InvalidInput when its TLS files cannot be used."""
        self._settings = discovery
        self._pools = pools
        self._roster = roster
        self._fixed = {target.name for target in settings.pools}
        self._missing: Counter[str] = Counter()
        self._told = ""
        self._channel = open_channel(discovery.address, discovery.tls, settings)
        self._list: grpc.aio.UnaryUnaryMultiCallable = self._channel.unary_unary(LIST_APPLICATIONS)

    async def run(self) -> None:
        """Goes on until it is cancelled."""
        while True:
            try:
                await self.look()
            except Exception as error:  # else no pool would ever be found again
                log_event(logger, logging.ERROR, "discovery_broken", {"error": repr(error)}, trace=True)
            await asyncio.sleep(self._settings.interval_s)

    async def look(self) -> None:
        """Asks once, and follows the answer."""
        try:
            names = strings_of(await self._list(b"", timeout=self._settings.timeout_s), _APPLICATION_NAMES)
        except (grpc.aio.AioRpcError, MalformedRequest) as error:
            cause = error.code().name if isinstance(error, grpc.aio.AioRpcError) else str(error)
            self._tell(cause)
            return
        self._tell("")
        found = {name for name in names if _POOL_NAME.fullmatch(name)} - self._fixed - set(self._settings.ignore)
        known = self._pools.by_name.keys() - self._fixed
        for name in sorted(found - known):
            log_event(logger, logging.INFO, "pool_found", {"pool": name})
            await self._roster.join(PoolTarget(name=name, address=self._settings.address, tls=self._settings.tls))
        self._missing = Counter({name: self._missing[name] + 1 for name in known - found})
        for name in sorted(self._missing):
            if self._missing[name] >= self._settings.gone_after:
                log_event(logger, logging.INFO, "pool_gone", {"pool": name})
                await self._roster.leave(name)

    async def close(self) -> None:
        await self._channel.close()

    def _tell(self, cause: str) -> None:
        """Says once that Serve does not answer, and once that it does again."""
        if cause != self._told:
            level, event = (logging.WARNING, "discovery_failed") if cause else (logging.INFO, "discovery_works")
            log_event(logger, level, event, {"address": self._settings.address, "cause": cause})
            self._told = cause
