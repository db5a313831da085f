"""Token buckets and bounds on a clock that the test moves; expected values are computed by hand."""

import asyncio

import grpc
import pytest

from deployments.router.tokens.entries import TokenEntry
from deployments.router.tokens.quota import IN_FLIGHT_RETRY_S, Bucket, Quota, TokenRefusal


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def entry(**limits: float | None) -> TokenEntry:
    wide = {"requests_per_second": 1e6, "burst": 1e6, "max_in_flight": 1000}
    return TokenEntry.model_validate({"name": "alice", "sha256": "0" * 64, **wide, **limits})


def refusal(quota: Quota) -> TokenRefusal | None:
    try:
        with quota.call():
            return None
    except TokenRefusal as error:
        return error


def test_a_bucket_fills_at_its_rate_up_to_its_size() -> None:
    bucket = Bucket(rate=2.0, size=4.0, now=0.0)
    assert bucket.take(4.0, 0.0, least=1.0) == 0.0
    assert bucket.take(1.0, 0.0, least=1.0) == pytest.approx(0.5)  # 1 token at 2 a second
    assert bucket.take(1.0, 0.5, least=1.0) == 0.0
    assert bucket.take(5.0, 100.0, least=5.0) == pytest.approx(0.5)  # never more than 4 in it


def test_an_overdrawn_bucket_is_paid_off() -> None:
    bucket = Bucket(rate=2.0, size=4.0, now=0.0)
    assert bucket.take(10.0, 0.0, least=1.0) == 0.0  # 6 below
    assert bucket.take(1.0, 0.0, least=1.0) == pytest.approx(3.5)  # 7 tokens
    assert bucket.take(1.0, 3.5, least=1.0) == 0.0


def test_reserving_waits_in_line() -> None:
    bucket = Bucket(rate=2.0, size=1.0, now=0.0)
    assert [bucket.reserve(1.0, 0.0) for _ in range(3)] == [0.0, 0.5, 1.0]


def test_new_limits_keep_what_is_in_the_bucket_but_no_more_than_fits() -> None:
    bucket = Bucket(rate=1.0, size=10.0, now=0.0)
    bucket.resize(rate=1.0, size=2.0, now=0.0)
    assert bucket.take(2.0, 0.0, least=2.0) == 0.0
    bucket.resize(rate=4.0, size=8.0, now=0.0)
    assert bucket.take(1.0, 0.0, least=1.0) == pytest.approx(0.25)


def test_calls_are_refused_beyond_burst_and_rate() -> None:
    clock = Clock()
    quota = Quota(entry(requests_per_second=4.0, burst=2.0), clock)
    assert refusal(quota) is None
    assert refusal(quota) is None
    refused = refusal(quota)
    assert refused is not None
    assert (refused.code, refused.reason, refused.token) == (grpc.StatusCode.RESOURCE_EXHAUSTED, "rate", "alice")
    clock.now += 0.25
    assert refusal(quota) is None
    assert refusal(quota) is not None


def test_a_refused_call_spends_nothing() -> None:
    clock = Clock()
    quota = Quota(entry(requests_per_second=1.0, burst=2.0, max_in_flight=1), clock)
    with quota.call():
        for _ in range(5):
            refused = refusal(quota)
            assert refused is not None
            assert refused.reason == "in_flight"
    # The second of two: those that found no room have left it.
    assert refusal(quota) is None
    refused = refusal(quota)
    assert refused is not None
    assert refused.reason == "rate"


def test_rounding_never_refuses_what_is_due() -> None:
    clock = Clock()
    quota = Quota(entry(requests_per_second=3.0, burst=1.0), clock)
    for _ in range(1000):
        assert refusal(quota) is None
        clock.now += 1 / 3


def test_items_without_a_limit_are_not_counted() -> None:
    quota = Quota(entry(), Clock())
    for _ in range(100):
        quota.spend_items(10**9)


def test_less_than_an_item_a_second_still_lets_one_through() -> None:
    clock = Clock()
    quota = Quota(entry(max_items_per_second=0.1), clock)
    quota.spend_items(1)
    with pytest.raises(TokenRefusal, match=r"0\.1 items a second"):
        quota.spend_items(1)
    clock.now += 10.0
    quota.spend_items(1)


def test_without_an_entry_nothing_is_limited() -> None:
    quota = Quota()
    for _ in range(100):
        assert refusal(quota) is None
    quota.spend_items(10**9)
    assert quota.name == ""


async def test_stream_items_take_turns_in_order() -> None:
    quota = Quota(entry(max_in_flight=1))
    order: list[int] = []
    gates = [asyncio.Event() for _ in range(3)]

    async def item(number: int) -> None:
        async with quota.turn():
            order.append(number)
            await gates[number].wait()

    tasks = [asyncio.create_task(item(number)) for number in range(3)]
    await asyncio.sleep(0)
    assert order == [0]
    with pytest.raises(TokenRefusal), quota.call():
        pass
    gates[0].set()
    gates[2].set()
    await tasks[0]
    await asyncio.sleep(0)
    assert order == [0, 1]
    gates[1].set()
    await asyncio.gather(*tasks)
    assert order == [0, 1, 2]
    assert refusal(quota) is None


async def test_an_item_that_is_cancelled_while_it_waits_leaves_its_turn_to_the_next() -> None:
    quota = Quota(entry(max_in_flight=1))
    leave = asyncio.Event()

    async def item() -> None:
        async with quota.turn():
            await leave.wait()

    first, second, third = (asyncio.create_task(item()) for _ in range(3))
    await asyncio.sleep(0)
    # The second one is told that it is its turn, and is cancelled before it can take it.
    leave.set()
    await first
    second.cancel()
    await asyncio.wait_for(third, 5)
    assert second.cancelled() or second.done()
    assert refusal(quota) is None


async def test_more_room_lets_waiting_items_go() -> None:
    quota = Quota(entry(max_in_flight=1))
    leave = asyncio.Event()
    inside = 0

    async def item() -> None:
        nonlocal inside
        async with quota.turn():
            inside += 1
            await leave.wait()

    tasks = [asyncio.create_task(item()) for _ in range(3)]
    await asyncio.sleep(0)
    assert inside == 1
    quota.update(entry(max_in_flight=2))
    await asyncio.sleep(0)
    assert inside == 2
    leave.set()
    await asyncio.gather(*tasks)


def test_a_call_that_finds_no_room_is_told_to_wait_a_little() -> None:
    quota = Quota(entry(max_in_flight=1))
    with quota.call():
        refused = refusal(quota)
    assert refused is not None
    assert f"{IN_FLIGHT_RETRY_S:g} s" in refused.message
