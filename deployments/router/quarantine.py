"""Keeps foreign vectors out: holds the pools against each other and quarantines those that do not belong.

What a pool that is down has shown still counts for a while: otherwise the pool that it was found to disagree with
would serve as soon as the good one restarts. Wrong vectors are worse than none.
"""

import asyncio
import dataclasses
import logging
import time
from collections.abc import Collection, Iterator, Mapping
from typing import cast

from deployments.router.agreement import Evidence, Verdict, judge
from deployments.router.goldens import GoldenAnswers, Vectors, encode_goldens, is_complete
from deployments.router.logs import log_event
from deployments.router.metrics import Metrics
from deployments.router.pools import Pool, PoolSet
from deployments.router.sections import AgreementSettings
from encoder.settings import TowerName
from encoder.v1 import encoder_pb2 as pb

logger = logging.getLogger(__name__)

# A tower of a model: the pools that serve it are held against each other.
Group = tuple[TowerName, str]


class Quarantine:
    """What the pools have shown, and what follows. Belongs to one event loop."""

    def __init__(self, pools: PoolSet, settings: AgreementSettings, metrics: Metrics) -> None:
        self.settings = settings
        self._pools = pools
        self._metrics = metrics
        self._shown: dict[Group, dict[str, Evidence]] = {}
        self._verdicts: dict[Group, Verdict] = {}
        self._awaited: set[str] = set()
        self._all_seen = asyncio.Event()
        self._settle_until = time.monotonic() + settings.settle_s

    async def check(self, pool: Pool) -> None:
        """Encodes the golden inputs in the pool, and judges anew. Raises as `encode_goldens` does."""
        inventory = pool.inventory
        assert inventory is not None
        shown: dict[Group, Evidence] = {}
        for tower, models in sorted(inventory.models.items()):
            for model in sorted(models):
                group = (cast(TowerName, tower), model)
                answers = await encode_goldens(pool, group[0], model, inventory.replicas, self.settings)
                former = self._shown.get(group, {}).get(pool.name)
                vectors = _merged(former, answers, inventory.replicas)
                listed = {report.fingerprint for report in pool.reports if report.model == model} - {""}
                shown[group] = Evidence(
                    pool.name,
                    frozenset(answers.fingerprints | listed),
                    vectors,
                    inventory.proven,
                    inventory.dtypes,
                    time.monotonic(),
                )
        if self._pools.by_name.get(pool.name) is not pool:
            return  # it has left meanwhile
        self._drop(pool.name)
        for group, evidence in shown.items():
            self._shown.setdefault(group, {})[pool.name] = evidence
        self._judge()

    def checked_at(self, pool: Pool) -> float:
        """When it was checked last (time.monotonic()); minus infinity for never."""
        return max((evidence.taken for _, evidence in self._of(pool)), default=float("-inf"))

    def knows(self, pool: Pool) -> bool:
        """Whether each replica that the pool reports has shown its vectors."""
        replicas = pool.inventory.replicas if pool.inventory is not None else frozenset()
        shown = [evidence.vectors for _, evidence in self._of(pool)]
        return bool(shown) and all(
            is_complete(vectors.get(replica, {})) for vectors in shown for replica in (*replicas, *vectors)
        )

    def vet(self, pool: Pool, tower: TowerName, source: pb.Provenance) -> str:
        """Why an answer of the pool with this source must not be used; empty when it may be.

        A replica that was never checked, or a fingerprint that was not shown, makes the pool's keeper look at it; a
        foreign fingerprint quarantines the pool at once when another one is in force.
        """
        group = (tower, source.model)
        evidence = self._shown.get(group, {}).get(pool.name)
        if evidence is not None:
            if source.fingerprint and source.fingerprint not in evidence.fingerprints:
                fingerprints = evidence.fingerprints | {source.fingerprint}
                self._shown[group][pool.name] = dataclasses.replace(evidence, fingerprints=fingerprints)
                self._judge()
                pool.has_changed()
            elif source.replica and source.replica not in evidence.vectors:
                pool.has_changed()
        return pool.quarantine

    def expect(self, pool: Pool) -> None:
        """The pool has joined; see `settled`."""
        self._awaited.add(pool.name)
        self._all_seen.clear()

    def leave(self, pool: Pool) -> None:
        """The pool is no part of the fleet any more."""
        self._drop(pool.name)
        self.arrived(pool)
        self._judge()

    def arrived(self, pool: Pool) -> None:
        """The pool's first round is over, whatever came of it."""
        self._awaited.discard(pool.name)
        if not self._awaited:
            self._all_seen.set()

    async def settled(self) -> None:
        """At the start: until each pool has had its first round, or `settle_s` have gone by.

        Otherwise the first pool to answer would serve alone, and might be found foreign a moment later.
        """
        try:
            async with asyncio.timeout(self._settle_until - time.monotonic()):
                await self._all_seen.wait()
        except TimeoutError:
            return

    def rows(self) -> list[tuple[TowerName, str, str, float]]:
        """Tower, pool, pool, lowest cosine; of a pool with itself only where it has several replicas."""
        return [
            (tower, one, other, cosine)
            for (tower, model), verdict in sorted(self._verdicts.items())
            for (one, other), cosine in verdict.cosines.items()
            if one != other or len(self._shown[tower, model][one].vectors) > 1
        ]

    def _of(self, pool: Pool) -> Iterator[tuple[Group, Evidence]]:
        for group, shown in self._shown.items():
            if pool.name in shown:
                yield group, shown[pool.name]

    def _drop(self, name: str) -> None:
        for shown in self._shown.values():
            shown.pop(name, None)

    def _judge(self) -> None:
        now = time.monotonic()
        order = {name: number for number, name in enumerate(self._pools.by_name)}
        reasons: dict[str, list[str]] = {}
        self._verdicts = {}
        for group, shown in list(self._shown.items()):
            for name, evidence in list(shown.items()):
                down = not self._pools.by_name[name].healthy
                if down and now - evidence.taken > self.settings.memory_s:
                    del shown[name]
            if not shown:
                del self._shown[group]
                continue
            verdict = judge(sorted(shown.values(), key=lambda one: order[one.pool]), self.settings.cosine)
            self._verdicts[group] = verdict
            for name, why in verdict.foreign.items():
                reasons.setdefault(name, []).append(why)
        for pool in self._pools.all:
            self._apply(pool, "; ".join(reasons.get(pool.name, ())))

    def _apply(self, pool: Pool, reason: str) -> None:
        if reason and not pool.quarantine:
            self._metrics.quarantine(pool.name)
            log_event(logger, logging.WARNING, "pool_quarantined", {"pool": pool.name, "reason": reason})
        elif pool.quarantine and not reason:
            log_event(logger, logging.WARNING, "pool_agrees_again", {"pool": pool.name})
        pool.quarantine = reason


def _merged(former: Evidence | None, answers: GoldenAnswers, present: Collection[str]) -> Mapping[str, Vectors]:
    """The new vectors, and the former ones of what was not asked this time: a replica computes what it computed.

    Of replicas that are neither `present` nor have answered, nothing is kept.
    """
    kept = former.vectors if former is not None else {}
    return {
        name: {**kept.get(name, {}), **answers.by_replica.get(name, {})} for name in {*present, *answers.by_replica}
    }
