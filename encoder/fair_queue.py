"""A queue in which every caller gets its turn: one of each caller's entries after the other, in the order they came."""

from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from itertools import chain
from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class FairQueue(Generic[Entry]):
    """Entries by caller. Who was served goes to the end, so that a request of thousands does not starve one of one."""

    def __init__(self) -> None:
        self._by_caller: dict[Hashable, deque[Entry]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Entry]:
        """All entries, those of one caller after the other."""
        return chain.from_iterable(self._by_caller.values())

    def push(self, caller: Hashable, entry: Entry) -> None:
        """`entry` is the last of its caller's."""
        self._by_caller.setdefault(caller, deque()).append(entry)
        self._count += 1

    def first(self, limit: int) -> list[tuple[Hashable, Entry]]:
        """The next `limit` with their callers, in the order in which they should be served; they stay."""
        found: list[tuple[Hashable, Entry]] = []
        queues = [(caller, iter(queue)) for caller, queue in self._by_caller.items()]
        while queues and len(found) < limit:
            still = []
            for caller, entries in queues[: limit - len(found)]:
                entry = next(entries, None)
                if entry is not None:
                    found.append((caller, entry))
                    still.append((caller, entries))
            queues = still
        return found

    def take(self, served: Iterable[tuple[Hashable, Entry]]) -> None:
        """They leave, and their callers go to the end."""
        for caller, entry in served:
            queue = self._by_caller.pop(caller)
            queue.remove(entry)
            self._count -= 1
            if queue:
                self._by_caller[caller] = queue

    def drain(self) -> list[Entry]:
        """All of them leave."""
        left = [entry for queue in self._by_caller.values() for entry in queue]
        self._by_caller.clear()
        self._count = 0
        return left
