"""The measured speed, on a clock that the test moves; expected values are computed by hand."""

import math

import pytest

from deployments.router.speed import Speed


def work(speed: Speed, begin: float, seconds: float, items: int, answered: bool = True) -> None:
    speed.start(items, begin)
    speed.finish(items, begin + seconds, answered)


def test_nothing_is_known_before_anything_happened() -> None:
    speed = Speed(0.0)
    assert speed.items_per_second() is None
    assert speed.ceiling(5.0) == math.inf
    speed.claimed = 40.0
    assert speed.items_per_second() == 40.0


def test_idle_time_does_not_count() -> None:
    speed = Speed(0.0)
    for begin in (0.0, 100.0, 200.0):
        work(speed, begin, 0.1, 1)
    # 1 item in 0.1 s, each time
    assert speed.items_per_second() == pytest.approx(10.0)


def test_a_measurement_replaces_the_pools_claim() -> None:
    speed = Speed(0.0)
    speed.claimed = 1000.0
    work(speed, 0.0, 0.5, 10)
    assert speed.items_per_second() == pytest.approx(20.0)


def test_what_is_under_way_together_counts_together() -> None:
    speed = Speed(0.0)
    speed.start(4, 0.0)
    speed.start(4, 0.1)
    speed.finish(4, 0.4, True)
    speed.finish(4, 0.5, True)
    # 8 items in 0.5 s
    assert speed.items_per_second() == pytest.approx(16.0)
    assert speed.in_flight == 0


def test_new_windows_move_the_average_by_their_weight() -> None:
    speed = Speed(0.0)
    work(speed, 0.0, 2.0, 20)  # 10 a second
    work(speed, 10.0, 2.0, 60)  # 30 a second
    # 10 + 0.3 * (30 - 10)
    assert speed.items_per_second() == pytest.approx(16.0)


def test_failures_are_no_work_done() -> None:
    speed = Speed(0.0)
    work(speed, 0.0, 1.5, 15)
    for attempt in range(100):
        work(speed, 10.0 + attempt, 0.001, 1000, answered=False)
    assert speed.items_per_second() == pytest.approx(10.0)
    assert speed.in_flight == 0


def test_a_call_longer_than_a_window_counts_in_full() -> None:
    speed = Speed(0.0)
    speed.start(10, 0.0)
    speed.start(10, 3.0)  # the window is over, but nothing was done in it yet
    speed.finish(10, 4.0, True)
    assert speed.items_per_second() == pytest.approx(2.5)  # 10 items in 4 s
    speed.finish(10, 5.0, True)  # 10 items in the second after
    assert speed.items_per_second() == pytest.approx(2.5 + 0.3 * (10.0 - 2.5))


def test_the_ceiling_falls_while_nothing_comes_back() -> None:
    speed = Speed(0.0)
    work(speed, 0.0, 1.0, 100)
    speed.start(5, 10.0)
    assert speed.ceiling(10.0) == math.inf
    assert speed.ceiling(10.1) == pytest.approx(50.0)  # 5 items, 0.1 s
    assert speed.ceiling(20.0) == pytest.approx(0.5)
    speed.finish(5, 20.0, True)
    assert speed.ceiling(21.0) == math.inf
