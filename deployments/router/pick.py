"""Chooses a pool for a request: a pure function of what was asked and of how the pools stand.

Of the pools that serve the tower and the model, healthy and not in quarantine, those are taken first that take the
request's mask themselves, are not ejected, and have not just failed it; of these, the one that is done first.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import grpc

from deployments.router.sections import MaskPolicy
from encoder.settings import TowerName

ITEM_WORDS: dict[str, str] = {"vision": "images", "text": "texts"}


@dataclass(frozen=True, slots=True)
class PoolView:
    """How one pool stands now.

    `towers` and `models` (by tower) are None until they are known; `items_per_second` is None until it is.
    `quarantine`: why it is in quarantine, or empty. `lacks`: by tower, the mask needs its backend does not take itself.
    """

    name: str
    towers: frozenset[str] | None
    models: Mapping[str, frozenset[str]] | None
    healthy: bool
    quarantine: str = ""
    ejected: bool = False
    lacks: Mapping[str, frozenset[str]] = field(default_factory=dict)
    in_flight: int = 0
    items_per_second: float | None = None
    ceiling: float = math.inf


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a request needs; `avoid` are pools that have just failed it, taken only when there is no other."""

    tower: TowerName
    items: int
    model: str = ""
    pool: str = ""
    avoid: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why there is no pool for a request."""

    code: grpc.StatusCode
    message: str


@dataclass(frozen=True, slots=True)
class Rules:
    """What holds for every request; `growing`: pools may still join, so that none now does not mean none."""

    default_model: str = ""
    masks: MaskPolicy = "prefer"
    growing: bool = False


def pick(wanted: Wanted, pools: Sequence[PoolView], rules: Rules) -> str | Refusal:
    """The name of the pool that should be done first with this request, or why there is none."""
    fitting = _of_tower(wanted, pools, rules.growing)
    if isinstance(fitting, Refusal):
        return fitting
    serving = _of_model(wanted, fitting, rules.default_model)
    if isinstance(serving, Refusal):
        return serving
    trusted = _in_force(wanted, serving)
    if isinstance(trusted, Refusal):
        return trusted
    able = _of_masks(wanted, serving, trusted, rules.masks)
    if isinstance(able, Refusal):
        return able
    candidates = [pool for pool in able if pool.name not in wanted.avoid] or able
    return _soonest(candidates, wanted.items).name


def _in_force(wanted: Wanted, serving: Sequence[PoolView]) -> Sequence[PoolView] | Refusal:
    items = ITEM_WORDS[wanted.tower]
    if wanted.pool and serving[0].quarantine:
        return Refusal(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"pool {wanted.pool!r} is in quarantine, {serving[0].quarantine}: choose another pool, or none",
        )
    trusted = [pool for pool in serving if pool.healthy and not pool.quarantine]
    if trusted:
        return trusted
    told = "; ".join(f"{pool.name} is in quarantine, {pool.quarantine}" for pool in serving if pool.quarantine)
    return Refusal(
        grpc.StatusCode.UNAVAILABLE,
        f"no pool that serves {items} is healthy (asked: {_names(serving)}{'; ' + told if told else ''}): "
        "try again later",
    )


def _of_masks(
    wanted: Wanted, serving: Sequence[PoolView], trusted: Sequence[PoolView], policy: MaskPolicy
) -> Sequence[PoolView] | Refusal:
    """Those of `trusted` to choose from, by their masks and ejections. An ejection never refuses a request."""
    able = [pool for pool in trusted if not _lacking(pool, wanted)]
    present = [pool for pool in trusted if not pool.ejected]
    best = [pool for pool in able if not pool.ejected]
    if policy == "prefer":
        return best or present or able or trusted
    if able:
        return best or able
    told = "; ".join(f"{pool.name} lacks {', '.join(_lacking(pool, wanted))}" for pool in trusted)
    items = ITEM_WORDS[wanted.tower]
    if len(trusted) < len(serving) and any(not _lacking(pool, wanted) for pool in serving):
        return Refusal(
            grpc.StatusCode.UNAVAILABLE,
            f"no pool whose attention backend takes the mask of these {items} is healthy ({told}): try again later",
        )
    return Refusal(
        grpc.StatusCode.FAILED_PRECONDITION,
        f"no attention backend takes the mask of these {items} itself ({told}), and the router's masks setting "
        "requires it: set it to prefer, or add a pool",
    )


def _lacking(pool: PoolView, wanted: Wanted) -> list[str]:
    return sorted(pool.lacks.get(wanted.tower, ()))


def _of_tower(wanted: Wanted, pools: Sequence[PoolView], growing: bool) -> Sequence[PoolView] | Refusal:
    items = ITEM_WORDS[wanted.tower]
    if wanted.pool:
        pinned = [pool for pool in pools if pool.name == wanted.pool]
        if not pinned:
            return Refusal(
                grpc.StatusCode.NOT_FOUND,
                f"there is no pool {wanted.pool!r}: choose one of {_names(pools) or '(none)'}, or none",
            )
        towers = pinned[0].towers
        if towers is not None and wanted.tower not in towers:
            return Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"pool {wanted.pool!r} serves {_served(towers)}, not {items}: choose another pool, or none",
            )
        return pinned
    fitting = [pool for pool in pools if pool.towers is None or wanted.tower in pool.towers]
    if not fitting and growing:
        return Refusal(
            grpc.StatusCode.UNAVAILABLE,
            f"no pool for {items} is known yet (pools: {_names(pools) or '(none)'}): try again later",
        )
    if not fitting:
        return Refusal(
            grpc.StatusCode.FAILED_PRECONDITION,
            f"no pool for {items} is configured (pools: {_names(pools)}): serve one, or name it to the router",
        )
    return [pool for pool in fitting if pool.towers is not None] or fitting


def _of_model(wanted: Wanted, fitting: Sequence[PoolView], default_model: str) -> Sequence[PoolView] | Refusal:
    model = wanted.model or ("" if wanted.pool else default_model)
    known = {pool.name: pool.models.get(wanted.tower, frozenset()) for pool in fitting if pool.models is not None}
    models = sorted({name for names in known.values() for name in names})
    if not model:
        # A pool knows its own default. Between pools, vectors of different models must never be mixed in silence.
        if len(models) > 1 and not wanted.pool:
            return Refusal(
                grpc.StatusCode.FAILED_PRECONDITION,
                f"several models serve {ITEM_WORDS[wanted.tower]} ({', '.join(models)}): name one in options.model",
            )
        return fitting
    serving = [pool for pool in fitting if model in known.get(pool.name, ())]
    if serving:
        return serving
    unasked = [pool for pool in fitting if pool.name not in known]
    if unasked:
        return Refusal(
            grpc.StatusCode.UNAVAILABLE,
            f"model {model!r} may be served by {_names(unasked)}, which did not answer yet: try again later",
        )
    where = f"pool {wanted.pool!r}" if wanted.pool else f"any pool for {ITEM_WORDS[wanted.tower]}"
    return Refusal(
        grpc.StatusCode.NOT_FOUND,
        f"model {model!r} is not served by {where}: choose one of {', '.join(models) or '(none)'}",
    )


def _soonest(candidates: Sequence[PoolView], items: int) -> PoolView:
    """The pool with the least expected time to completion; of equals the one with less in flight, then the first."""
    speeds = [pool.items_per_second for pool in candidates if pool.items_per_second]
    # A pool not measured yet is taken for as fast as the fastest, so that it gets measured.
    hoped = max(speeds, default=1.0)

    def seconds(pool: PoolView) -> float:
        speed = min(pool.items_per_second or hoped, pool.ceiling)
        return (pool.in_flight + items) / speed

    return min(candidates, key=lambda pool: (seconds(pool), pool.in_flight))


def _names(pools: Iterable[PoolView]) -> str:
    return ", ".join(pool.name for pool in pools)


def _served(towers: Iterable[str]) -> str:
    return " and ".join(sorted(ITEM_WORDS[tower] for tower in towers)) or "nothing"
