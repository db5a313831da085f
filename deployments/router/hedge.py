"""A second call for a request whose first one is slow; the first answer counts, and the other call is cancelled."""

import asyncio
from collections.abc import Awaitable, Callable

from deployments.router.attempts import AttemptFailed
from deployments.router.metrics import Metrics
from deployments.router.pools import Pool
from deployments.router.sections import HedgeSettings
from encoder.errors import without_traceback

Attempt = Callable[[Pool], Awaitable[bytes]]


async def race(
    first: Pool, choose_second: Callable[[], Pool | None], attempt: Attempt, after_s: float, metrics: Metrics
) -> bytes | list[AttemptFailed]:
    """The answer of `first`, or of the second pool, chosen when `first` has taken `after_s`; or how all asked failed.

    `choose_second` gives None when there shall be no second call.
    """
    calls = [asyncio.ensure_future(attempt(first))]
    failures: list[AttemptFailed] = []
    second: Pool | None = None
    try:
        done, waiting = await asyncio.wait(calls, timeout=after_s)
        if not done and (second := choose_second()) is not None:
            calls.append(asyncio.ensure_future(attempt(second)))
            waiting = set(calls)
        while done or waiting:
            for call in done:
                try:
                    answer = await call
                except AttemptFailed as error:
                    failures.append(without_traceback(error))
                else:
                    if second is not None:
                        metrics.hedge(second.name, "lost" if call is calls[0] else "won")
                    return answer
            if not waiting:
                break
            done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        return failures
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


def hedge_after_s(settings: HedgeSettings, asked_s: float | None) -> float | None:
    """After how many seconds a request is hedged: the sooner of the caller's wish and the setting; None for never."""
    wishes = [settings.after_ms / 1e3] if settings.after_ms is not None else []
    if asked_s is not None and settings.by_metadata:
        wishes.append(max(asked_s, settings.least_ms / 1e3))
    return min(wishes, default=None)
