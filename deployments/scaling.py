"""How many replicas a pool should have: by the calls under way, and by how long work waits.

Serve's own policy counts calls. A call of 500 pictures counts as one, and so does one slow picture, so a pool whose
calls are big or slow never grows by it. Each replica therefore tells how old its queue is
(`record_autoscaling_stats`, which Serve asks for in HAProxy mode and with its stock proxy alike), and this policy
grows the pool until work waits no longer than the target. Serve pickles this module by value and calls the policy in
its controller, then applies delays, factors and bounds itself.
"""

from collections.abc import Mapping
from typing import Any, Protocol

# The key under which a replica tells, and Serve hands on, how long its oldest item has been waiting; seconds.
QUEUE_AGE_KEY = "queue_age_s"
# A pool grows to this multiple at most in one decision: ages grow without bound while new replicas start.
MOST_GROWTH = 2.0
# Below this share of the target the calls alone decide; between it and the target a pool does not shrink.
CALM_SHARE = 0.5


class ScalingContext(Protocol):
    """What the policy reads of ray.serve.config.AutoscalingContext."""

    current_num_replicas: int
    target_num_replicas: int
    config: Any

    @property
    def total_num_requests(self) -> float: ...
    @property
    def aggregated_metrics(self) -> Mapping[str, Mapping[Any, float]] | None: ...


def replicas_for(
    replicas: int,
    ongoing_requests: float,
    target_ongoing_requests: float,
    queue_age_s: float,
    target_queue_age_s: float,
) -> float:
    """Replicas a pool of `replicas` (at least 1) should have.

    `queue_age_s`: mean over the replicas of how long their oldest items wait. As many as the calls ask for; more, in
    proportion and twice as many at most, while the age is over its target; no fewer than now while it is not well
    below.
    """
    by_calls = ongoing_requests / target_ongoing_requests
    share = queue_age_s / target_queue_age_s
    if share > 1.0:
        return max(by_calls, replicas * min(share, MOST_GROWTH))
    return max(by_calls, replicas) if share > CALM_SHARE else by_calls


class QueueAgePolicy:
    """A Serve autoscaling policy; Serve makes it with `policy_kwargs`."""

    def __init__(self, target_queue_age_s: float) -> None:
        self._target_s = target_queue_age_s

    def __call__(self, context: ScalingContext) -> tuple[float, dict[str, Any]]:
        replicas = context.current_num_replicas
        if replicas == 0:
            # Serve itself wakes a pool from zero as soon as a call waits.
            return context.target_num_replicas, {}
        ages = (context.aggregated_metrics or {}).get(QUEUE_AGE_KEY, {}).values()
        wanted = replicas_for(
            replicas,
            context.total_num_requests,
            context.config.get_target_ongoing_requests(),
            # Who has not told yet has just started, and has no queue.
            sum(ages) / replicas,
            self._target_s,
        )
        return wanted, {}
