"""How often, and after which pause, a failed call is tried again."""

import random

from deployments.router.settings import RetrySettings


class RetryBudget:
    """Retries are a share of the requests: when much fails, trying again must not multiply the load."""

    def __init__(self, settings: RetrySettings) -> None:
        self._ratio = settings.budget_ratio
        self._burst = settings.budget_burst
        self._saved = settings.budget_burst

    def earn(self) -> None:
        """A request came."""
        self._saved = min(self._burst, self._saved + self._ratio)

    def spend(self) -> bool:
        """Takes one retry out of the budget; False when there is none left."""
        if self._saved < 1.0:
            return False
        self._saved -= 1.0
        return True


def pause_s(settings: RetrySettings, attempt: int, asked_s: float, chance: random.Random) -> float:
    """Seconds to wait after failed attempt number `attempt` (from 1).

    Jittered over the whole range, which doubles each time; at least `asked_s`, which the pool asked for.
    """
    longest = min(settings.backoff_max_s, settings.backoff_s * 2 ** (attempt - 1))
    return asked_s + chance.uniform(0.0, longest)
