"""Which pools' vectors belong together: a pure function of what the pools showed.

Two pools agree when they answer under the same fingerprint and no golden input's vectors differ by more than the least
cosine allows. One pool is the reference, and a pool that does not agree with it is foreign: their vectors would be
mixed in one index. The reference is the first by this order, so that every router comes to the same one by itself:

1. a pool whose own replicas agree with each other,
2. which agrees with most other pools: the majority decides,
3. whose replicas have all proven themselves in their self-checks,
4. which computes in the wider type: float32, then the 16-bit floats, then int8,
5. which comes first in the settings (pools that were found come after them, by name).

So of two pools that disagree one is always left, and never both.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np

from deployments.router.goldens import Vectors

# Where one pool gives a vector and the other none, or one of another length.
NO_COSINE = -1.0
_WIDTHS = {"float32": 0, "bfloat16": 1, "float16": 1, "int8": 2}
_UNKNOWN_WIDTH = 3


@dataclass(frozen=True)
class Evidence:
    """What one pool showed for one tower of one model; `taken` is a time of `time.monotonic()`."""

    pool: str
    fingerprints: frozenset[str]
    vectors: Mapping[str, Vectors]
    proven: bool
    dtypes: frozenset[str]
    taken: float


@dataclass(frozen=True)
class Verdict:
    """`foreign`: pool → why. `cosines`: lowest cosine of each two pools (a pool with itself: between its replicas)."""

    reference: str
    foreign: Mapping[str, str]
    cosines: Mapping[tuple[str, str], float]


def judge(shown: Sequence[Evidence], least_cosine: float) -> Verdict:
    """`shown`: one for each pool, at least one, in the order of the settings."""
    cosines = {(one.pool, one.pool): _within(one.vectors) for one in shown}
    for one, other in combinations(shown, 2):
        cosines[one.pool, other.pool] = worst_cosine(one.vectors.values(), other.vectors.values())

    def reason(one: Evidence, reference: Evidence) -> str:
        if one.fingerprints != reference.fingerprints:
            return (
                f"it answers under fingerprint {_listed(one.fingerprints)}, and pool {reference.pool!r}, the "
                f"reference, under {_listed(reference.fingerprints)}"
            )
        key = (one.pool, reference.pool)
        cosine = cosines[key] if key in cosines else cosines[reference.pool, one.pool]
        if cosine >= least_cosine:
            return ""
        return (
            f"its golden vectors are at cosine {cosine:.4f} to those of pool {reference.pool!r}, the reference, and "
            f"{least_cosine:g} is the least"
        )

    def rank(one: Evidence) -> tuple[bool, int, bool, int]:
        sound = len(one.fingerprints) <= 1 and cosines[one.pool, one.pool] >= least_cosine
        friends = sum(not reason(other, one) for other in shown if other is not one)
        width = max((_WIDTHS.get(dtype, _UNKNOWN_WIDTH) for dtype in one.dtypes), default=_UNKNOWN_WIDTH)
        return not sound, -friends, not one.proven, width

    reference = min(shown, key=rank)  # of equals the first
    reasons = {one.pool: reason(one, reference) for one in shown if one is not reference}
    return Verdict(reference.pool, {pool: why for pool, why in reasons.items() if why}, cosines)


def worst_cosine(ones: Iterable[Vectors], others: Iterable[Vectors]) -> float:
    """The lowest cosine over all pairs of replicas and all golden inputs that both were asked for; 1 without any."""
    others = list(others)
    return min((_cosine(one, other) for one in ones for other in others), default=1.0)


def _within(vectors: Mapping[str, Vectors]) -> float:
    return min((_cosine(one, other) for one, other in combinations(vectors.values(), 2)), default=1.0)


def _cosine(one: Vectors, other: Vectors) -> float:
    return min((_of_two(one[number], other[number]) for number in one.keys() & other.keys()), default=1.0)


def _of_two(one: np.ndarray | None, other: np.ndarray | None) -> float:
    if one is None and other is None:
        return 1.0  # both refuse that input
    if one is None or other is None or len(one) != len(other):
        return NO_COSINE
    a, b = one.astype(np.float64), other.astype(np.float64)
    lengths = float(np.linalg.norm(a) * np.linalg.norm(b))
    cosine = float(a @ b) / lengths if lengths else NO_COSINE
    return cosine if np.isfinite(cosine) else NO_COSINE


def _listed(fingerprints: Iterable[str]) -> str:
    return " and ".join(sorted(fingerprints)) or "(none)"
