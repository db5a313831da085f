"""The choice of a pool, and the refusals; expected values are computed by hand."""

import math
from dataclasses import replace

import grpc
import pytest

from deployments.router import pick as choice
from deployments.router.pick import PoolView, Refusal, Rules, Wanted

Code = grpc.StatusCode


def view(name: str, speed: float | None = None, in_flight: int = 0, **changes: object) -> PoolView:
    tower = str(changes.pop("tower", "vision"))
    model = str(changes.pop("model", "clip"))
    pool = PoolView(
        name,
        towers=frozenset({tower}),
        models={tower: frozenset({model})},
        healthy=True,
        in_flight=in_flight,
        items_per_second=speed,
    )
    return replace(pool, **changes)


IMAGE = Wanted("vision", 1)


def pick(wanted: Wanted, pools: list[PoolView], default_model: str = "") -> str | Refusal:
    return choice.pick(wanted, pools, Rules(default_model))


@pytest.mark.parametrize(
    ("pools", "items", "chosen"),
    [
        # (0 + 1)/10 against (0 + 1)/100
        ([view("a", 10), view("b", 100)], 1, "b"),
        # (0 + 1)/10 = 0.1 against (10 + 1)/100 = 0.11
        ([view("a", 10), view("b", 100, 10)], 1, "a"),
        # (0 + 8)/10 = 0.8 against (10 + 8)/100 = 0.18: a big batch is better off at the fast one
        ([view("a", 10), view("b", 100, 10)], 8, "b"),
        # equal times: less in flight, then the first
        ([view("a", 100, 9), view("b", 10)], 1, "b"),
        ([view("a", 10), view("b", 10)], 1, "a"),
        # not measured: taken for as fast as the fastest
        ([view("a", 100, 1), view("b")], 1, "b"),
        ([view("a", 100), view("b", None, 1)], 1, "a"),
        # nobody measured: least in flight
        ([view("a", None, 2), view("b", None, 1)], 1, "b"),
        # a pool that holds on to what it has is not as fast as it was: 2/0.5 against 1/10
        ([view("a", 1000, 1, ceiling=0.5), view("b", 10)], 1, "b"),
        ([view("a", None, 1, ceiling=0.5), view("b", 10)], 1, "b"),
    ],
)
def test_the_soonest_done_is_chosen(pools: list[PoolView], items: int, chosen: str) -> None:
    assert pick(Wanted("vision", items), pools) == chosen


def test_unhealthy_pools_are_not_chosen_and_failed_ones_only_when_alone() -> None:
    pools = [view("a", 100, healthy=False), view("b", 50), view("c", 10)]
    assert pick(IMAGE, pools) == "b"
    assert pick(replace(IMAGE, avoid=frozenset({"b"})), pools) == "c"
    assert pick(replace(IMAGE, avoid=frozenset({"b", "c"})), pools) == "b"


def refusal(wanted: Wanted, pools: list[PoolView], default_model: str = "") -> Refusal:
    chosen = pick(wanted, pools, default_model)
    assert isinstance(chosen, Refusal)
    assert "\n" not in chosen.message
    return chosen


def test_towers() -> None:
    vision, text = view("v"), view("t", tower="text")
    both = view(
        "both", towers=frozenset({"vision", "text"}), models={"vision": frozenset({"clip"}), "text": frozenset()}
    )
    unknown = view("u", towers=None, models=None, healthy=False)
    assert pick(Wanted("text", 1), [vision, text]) == "t"
    assert pick(Wanted("text", 1), [vision, both]) == "both"
    assert refusal(Wanted("text", 1), [vision]).code is Code.FAILED_PRECONDITION
    # Not known yet is not the same as not there.
    assert refusal(Wanted("text", 1), [vision, unknown]).code is Code.UNAVAILABLE
    assert pick(IMAGE, [unknown, vision]) == "v"


def test_pinning() -> None:
    pools = [view("v"), view("t", tower="text"), view("down", healthy=False)]
    assert pick(Wanted("vision", 1, pool="v"), pools) == "v"
    assert refusal(Wanted("vision", 1, pool="t"), pools).code is Code.FAILED_PRECONDITION
    assert refusal(Wanted("vision", 1, pool="down"), pools).code is Code.UNAVAILABLE
    unknown = refusal(Wanted("vision", 1, pool="x"), pools)
    assert unknown.code is Code.NOT_FOUND
    assert "v, t, down" in unknown.message
    # A pinned pool is used again after it has failed.
    assert pick(Wanted("vision", 1, pool="v", avoid=frozenset({"v"})), pools) == "v"


def test_models() -> None:
    clip, siglip = view("c", model="clip"), view("s", 100, model="siglip")
    silent = view("q", models=None, healthy=False)
    assert pick(Wanted("vision", 1, model="clip"), [clip, siglip]) == "c"
    assert pick(IMAGE, [clip, siglip], "siglip") == "s"
    assert pick(Wanted("vision", 1, model="clip"), [clip, siglip], "siglip") == "c"
    assert refusal(IMAGE, [clip, siglip]).code is Code.FAILED_PRECONDITION
    missing = refusal(Wanted("vision", 1, model="dino"), [clip, siglip])
    assert missing.code is Code.NOT_FOUND
    assert "clip, siglip" in missing.message
    assert refusal(Wanted("vision", 1, model="dino"), [clip, silent]).code is Code.UNAVAILABLE
    # The default model is for the router's own choice; a pinned pool has its own.
    assert pick(Wanted("vision", 1, pool="c"), [clip, siglip], "siglip") == "c"
    pinned = refusal(Wanted("vision", 1, model="clip", pool="s"), [clip, siglip])
    assert pinned.code is Code.NOT_FOUND
    assert "pool 's'" in pinned.message
    # A model of the other tower does not count.
    assert pick(IMAGE, [clip, view("t", tower="text", model="other")]) == "c"


def test_a_model_that_is_down_still_keeps_its_vectors_apart() -> None:
    pools = [view("c", model="clip"), view("s", model="siglip", healthy=False)]
    assert refusal(IMAGE, pools).code is Code.FAILED_PRECONDITION
    assert refusal(Wanted("vision", 1, model="siglip"), pools).code is Code.UNAVAILABLE


def test_an_idle_pool_has_no_ceiling() -> None:
    assert view("a").ceiling == math.inf


def with_rules(wanted: Wanted, pools: list[PoolView], **rules: object) -> str | Refusal:
    return choice.pick(wanted, pools, replace(Rules(), **rules))


def test_a_pool_in_quarantine_is_not_chosen_and_a_pinned_one_is_refused_with_the_reason() -> None:
    pools = [view("a", 100, quarantine="its vectors differ"), view("b", 1)]
    assert pick(IMAGE, pools) == "b"
    assert pick(replace(IMAGE, avoid=frozenset({"b"})), pools) == "b"
    pinned = refusal(Wanted("vision", 1, pool="a"), pools)
    assert pinned.code is Code.FAILED_PRECONDITION
    assert "its vectors differ" in pinned.message
    # Down or not: it is not to be waited for.
    pools[0] = replace(pools[0], healthy=False)
    assert refusal(Wanted("vision", 1, pool="a"), pools).code is Code.FAILED_PRECONDITION
    # When nothing else is left, wrong vectors are still worse than none.
    pools[1] = replace(pools[1], healthy=False)
    nothing = refusal(IMAGE, pools)
    assert nothing.code is Code.UNAVAILABLE
    assert "a is in quarantine, its vectors differ" in nothing.message


def test_an_ejected_pool_is_chosen_only_when_there_is_no_other() -> None:
    pools = [view("a", 100, ejected=True), view("b", 1)]
    assert pick(IMAGE, pools) == "b"
    # A pool that has just failed this request is still better than one that fails most.
    assert pick(replace(IMAGE, avoid=frozenset({"b"})), pools) == "b"
    assert pick(IMAGE, [pools[0], replace(pools[1], ejected=True)]) == "a"
    assert pick(Wanted("vision", 1, pool="a"), pools) == "a"


CAUSAL = {"text": frozenset({"causal"})}
TEXT = Wanted("text", 1)


def text_view(name: str, speed: float, **changes: object) -> PoolView:
    return view(name, speed, tower="text", **changes)


def test_masked_calls_prefer_a_pool_whose_backend_takes_the_mask() -> None:
    lacking, taking = text_view("a", 1000, lacks=CAUSAL), text_view("b", 1)
    assert pick(TEXT, [lacking, taking]) == "b"
    # However much is in flight there.
    assert pick(TEXT, [lacking, replace(taking, in_flight=10_000)]) == "b"
    # What the other tower lacks does not count.
    assert pick(TEXT, [replace(lacking, lacks={"vision": frozenset({"additive"})}), taking]) == "a"
    # While that pool cannot, the other one does it with the fallback.
    assert pick(TEXT, [lacking, replace(taking, healthy=False)]) == "a"
    assert pick(TEXT, [lacking, replace(taking, quarantine="foreign")]) == "a"
    assert pick(TEXT, [lacking, replace(taking, ejected=True)]) == "a"
    assert pick(Wanted("text", 1, pool="a"), [lacking, taking]) == "a"
    assert pick(TEXT, [replace(lacking, ejected=True), replace(taking, ejected=True)]) == "b"


def test_required_masks_are_never_left_to_the_fallback() -> None:
    lacking, taking = text_view("a", 1000, lacks=CAUSAL), text_view("b", 1)
    assert with_rules(TEXT, [lacking, taking], masks="require") == "b"
    assert with_rules(TEXT, [lacking, replace(taking, ejected=True)], masks="require") == "b"
    for wanted, pools, code in (
        (TEXT, [lacking], Code.FAILED_PRECONDITION),
        (Wanted("text", 1, pool="a"), [lacking, taking], Code.FAILED_PRECONDITION),
        # One that could is only away.
        (TEXT, [lacking, replace(taking, healthy=False)], Code.UNAVAILABLE),
        (TEXT, [lacking, replace(taking, quarantine="foreign")], Code.UNAVAILABLE),
        (TEXT, [replace(lacking, healthy=False)], Code.UNAVAILABLE),
    ):
        refused = with_rules(wanted, pools, masks="require")
        assert isinstance(refused, Refusal)
        assert refused.code is code
        if code is Code.FAILED_PRECONDITION:
            assert "a lacks causal" in refused.message
    # Pictures of the same pools need no mask.
    assert with_rules(IMAGE, [view("v", lacks={"text": frozenset({"causal"})})], masks="require") == "v"


def test_a_growing_fleet_may_still_get_the_pool_that_is_missing() -> None:
    for pools in ([], [view("v")]):
        none_yet = with_rules(TEXT, pools, growing=True)
        assert isinstance(none_yet, Refusal)
        assert none_yet.code is Code.UNAVAILABLE
        assert refusal(TEXT, pools).code is Code.FAILED_PRECONDITION
