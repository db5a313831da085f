"""Turns: every caller's first before anyone's second, in the order they came."""

from encoder.fair_queue import FairQueue


def filled(entries: str) -> FairQueue[str]:
    """'a1 a2 b1': the letter is the caller."""
    queue: FairQueue[str] = FairQueue()
    for entry in entries.split():
        queue.push(entry[0], entry)
    return queue


def served(queue: FairQueue[str], at_once: int) -> list[str]:
    rounds = []
    while entries := queue.first(at_once):
        rounds.append(" ".join(entry for _, entry in entries))
        queue.take(entries)
    assert len(queue) == 0
    return rounds


def test_callers_take_turns() -> None:
    assert served(filled("a1 a2 a3 b1 c1 c2"), 10) == ["a1 b1 c1 a2 c2 a3"]
    assert served(filled("a1 a2 a3 a4 b1"), 2) == ["a1 b1", "a2 a3", "a4"]
    assert served(filled("a1 a2 a3 b1 b2 c1"), 1) == ["a1", "b1", "c1", "a2", "b2", "a3"]


def test_who_comes_late_waits_one_turn_not_a_whole_request() -> None:
    queue = filled("a1 a2 a3 a4 a5 a6")
    queue.take(queue.first(2))
    queue.push("b", "b1")
    assert [entry for _, entry in queue.first(3)] == ["a3", "b1", "a4"]


def test_alone_it_is_a_queue() -> None:
    queue = filled("a1 a2 a3 a4 a5")
    assert served(queue, 2) == ["a1 a2", "a3 a4", "a5"]


def test_any_entry_can_leave() -> None:
    queue = filled("a1 a2 a3 b1")
    queue.take([("a", "a2")])
    assert len(queue) == 3 and served(queue, 10) == ["b1 a1 a3"]


def test_drain() -> None:
    queue = filled("a1 b1 a2")
    assert queue.drain() == ["a1", "a2", "b1"] and len(queue) == 0 and queue.first(5) == []
