"""The tokens in force, and the file they come from."""

import asyncio
import hmac
import logging

from deployments.router.logs import log_event
from deployments.router.metrics import Metrics
from deployments.router.sections import TokenSettings
from deployments.router.tokens.entries import digest_of, load_entries
from deployments.router.tokens.quota import Quota
from deployments.router.watched import signature
from encoder.errors import InvalidInput

logger = logging.getLogger(__name__)


class Keyring:
    """Raises InvalidInput for a file that cannot be used at the start; later such a file is told, and not used."""

    def __init__(self, settings: TokenSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._seen = signature([settings.file])
        self._quotas: list[tuple[str, Quota]] = [(entry.sha256, Quota(entry)) for entry in load_entries(settings.file)]

    def find(self, token: str) -> Quota | None:
        """What the token may do; None for an unknown one. Takes as long whichever entry it is, or none."""
        digest = digest_of(token)
        found = None
        for sha256, quota in self._quotas:
            if hmac.compare_digest(sha256, digest):
                found = quota
        return found

    async def follow(self) -> None:
        """Takes over a changed file, until it is cancelled."""
        while True:
            await asyncio.sleep(self._settings.reload_s)
            await self.refresh()

    async def refresh(self) -> None:
        """Reads the file again when it has changed. An entry keeps by its name what it has spent."""
        file = self._settings.file
        now = await asyncio.to_thread(signature, [file])
        if now == self._seen:
            return
        self._seen = now
        try:
            entries = await asyncio.to_thread(load_entries, file)
        except InvalidInput as error:
            self._metrics.reload("tokens", "refused")
            log_event(logger, logging.ERROR, "tokens_refused", {"reason": str(error), "kept": "the former ones"})
            return
        former = {quota.name: quota for _, quota in self._quotas}
        quotas = []
        for entry in entries:
            quota = former.get(entry.name) or Quota(entry)
            quota.update(entry)
            quotas.append((entry.sha256, quota))
        self._quotas = quotas
        self._metrics.reload("tokens", "loaded")
        log_event(logger, logging.INFO, "tokens_loaded", {"entries": len(entries)})
