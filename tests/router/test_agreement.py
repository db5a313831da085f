"""Which pools belong together: the reference, the reasons and the cosines, computed by hand."""

from dataclasses import replace

import numpy as np
import pytest

from deployments.router.agreement import NO_COSINE, Evidence, Verdict, judge, worst_cosine
from deployments.router.goldens import Vectors

LEAST = 0.995


def at(degrees: float) -> np.ndarray:
    """A vector of length 2: lengths do not count."""
    return np.array([2 * np.cos(np.radians(degrees)), 2 * np.sin(np.radians(degrees))], np.float32)


def replica(*degrees: float | None) -> Vectors:
    return {number: None if one is None else at(one) for number, one in enumerate(degrees)}


def shown(pool: str, *degrees: float | None, **changes: object) -> Evidence:
    """A pool with one replica whose golden vectors point to these directions."""
    one = Evidence(pool, frozenset({"f1"}), {f"{pool}-0": replica(*degrees)}, True, frozenset({"float32"}), 0.0)
    return replace(one, **changes)


def verdict(*pools: Evidence) -> Verdict:
    return judge(pools, LEAST)


def test_the_cosine_of_a_pair_is_that_of_its_worst_golden_input() -> None:
    found = verdict(shown("a", 0, 0, 0), shown("b", 0, 3, 60))
    assert found.cosines["a", "b"] == pytest.approx(0.5)
    assert found.cosines["a", "a"] == 1.0
    assert worst_cosine([replica(0)], [replica(180)]) == pytest.approx(-1.0)


def test_of_several_replicas_the_worst_pair_counts() -> None:
    assert worst_cosine([replica(0), replica(10)], [replica(0), replica(-20)]) == pytest.approx(
        np.cos(np.radians(30)), abs=1e-6
    )


def test_an_input_that_both_refuse_says_nothing_and_one_that_one_refuses_says_all() -> None:
    assert worst_cosine([replica(0, None)], [replica(0, None)]) == pytest.approx(1.0)
    assert worst_cosine([replica(0, None)], [replica(0, 0)]) == NO_COSINE
    # What one of them was not asked yet is left out.
    assert worst_cosine([{0: at(0)}], [{0: at(0), 1: None}]) == pytest.approx(1.0)


@pytest.mark.parametrize(
    "vector", [np.zeros(2, np.float32), np.array([np.nan, 1], np.float32), np.ones(3, np.float32)], ids=str
)
def test_vectors_that_have_no_cosine_agree_with_nothing(vector: np.ndarray) -> None:
    assert worst_cosine([{0: vector}], [{0: at(0)}]) == NO_COSINE


def test_pools_that_agree_all_stay() -> None:
    found = verdict(shown("a", 0), shown("b", 3), shown("c", -2))
    assert found.foreign == {}


def test_the_tolerance_is_the_least_cosine() -> None:
    # cos 5.7° = 0.99506, cos 5.8° = 0.99488
    assert verdict(shown("a", 0), shown("b", 5.7)).foreign == {}
    found = verdict(shown("a", 0), shown("b", 5.8))
    assert found.foreign.keys() == {"b"}
    assert "cosine 0.9949 to those of pool 'a'" in found.foreign["b"]


def test_the_majority_decides_before_anything_else() -> None:
    # The odd one is first, proven, and computes in the widest type.
    odd = shown("odd", 90)
    others = [shown(name, 0, proven=False, dtypes=frozenset({"int8"})) for name in ("b", "c")]
    found = verdict(odd, *others)
    assert found.reference == "b"
    assert found.foreign.keys() == {"odd"}


@pytest.mark.parametrize(
    ("first", "second", "stays"),
    [
        # Of two that disagree, the one that has not proven itself leaves,
        ({"proven": False}, {"dtypes": frozenset({"int8"})}, "second"),
        # then the one of the narrower type,
        ({"dtypes": frozenset({"bfloat16"})}, {"dtypes": frozenset({"float32"})}, "second"),
        ({"dtypes": frozenset({"int8"})}, {"dtypes": frozenset({"float16"})}, "second"),
        ({"dtypes": frozenset({"fp4"})}, {"dtypes": frozenset({"int8"})}, "second"),
        ({"dtypes": frozenset()}, {"dtypes": frozenset({"int8"})}, "second"),
        # a pool counting by its narrowest replica,
        ({"dtypes": frozenset({"float32", "int8"})}, {"dtypes": frozenset({"bfloat16"})}, "second"),
        ({"dtypes": frozenset({"bfloat16"})}, {"dtypes": frozenset({"float16"})}, "first"),
        # then the later one.
        ({}, {}, "first"),
    ],
)
def test_of_two_that_disagree_one_stays(first: dict[str, object], second: dict[str, object], stays: str) -> None:
    found = verdict(shown("first", 0, **first), shown("second", 90, **second))
    assert found.reference == stays
    assert found.foreign.keys() == {"first", "second"} - {stays}


def test_another_fingerprint_is_foreign_whatever_the_vectors_say() -> None:
    pools = [shown(name, 0) for name in ("a", "b")]
    found = verdict(shown("new", 0, fingerprints=frozenset({"f2"})), *pools)
    assert found.foreign.keys() == {"new"}
    assert "under fingerprint f2, and pool 'a', the reference, under f1" in found.foreign["new"]
    # Nor do they count as agreeing with each other.
    assert verdict(*pools, shown("c", 0, fingerprints=frozenset({"f2"}))).reference == "a"


def test_a_pool_that_is_being_updated_gives_way_to_one_that_is_whole() -> None:
    mixed = shown("first", 0, fingerprints=frozenset({"f1", "f2"}))
    found = verdict(mixed, shown("second", 0, proven=False))
    assert found.reference == "second"
    assert "under fingerprint f1 and f2" in found.foreign["first"]
    # Alone it serves.
    assert verdict(mixed).foreign == {}


def test_a_pool_whose_replicas_disagree_is_no_reference() -> None:
    torn = shown("first", vectors={"r0": replica(0), "r1": replica(90)})
    found = verdict(torn, shown("second", 0, proven=False))
    assert found.reference == "second"
    assert found.foreign.keys() == {"first"}
    assert found.cosines["first", "first"] == pytest.approx(0.0, abs=1e-6)
    # Alone it serves: there is nothing better.
    assert verdict(torn).foreign == {}


def test_all_are_held_against_the_reference_and_not_against_each_other() -> None:
    # b agrees with both of its neighbours, which do not agree: 4° between neighbours, 8° at the ends.
    found = verdict(shown("a", 0), shown("b", 4), shown("c", 8))
    assert found.reference == "b"
    assert found.foreign == {}


def test_two_camps_of_equal_size_are_never_mixed() -> None:
    camps = [shown("a", 0), shown("b", 90), shown("c", 1), shown("d", 91)]
    found = verdict(*camps)
    assert found.reference == "a"
    assert found.foreign.keys() == {"b", "d"}
    proven = verdict(*(replace(one, proven=one.pool == "d") for one in camps))
    assert proven.reference == "d"
    assert proven.foreign.keys() == {"a", "c"}


def test_every_router_comes_to_the_same_verdict() -> None:
    pools = [shown("a", 0), shown("b", 90), shown("c", 45, proven=False)]
    assert verdict(*pools) == verdict(*pools)
    assert verdict(pools[0]).reference == "a"
