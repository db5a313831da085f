"""The batcher: what waits goes to the device as soon as the device is free; no timer.

One task owns the queue; one dedicated thread owns the forward. Callers take turns, so that a big request does not
starve a small one, and of what is next a plan says what goes together. An item that was cancelled, or is past its
deadline, is dropped before it costs device time. A forward that fails is tried again item by item, so that one bad
item fails alone.
"""

import asyncio
import time
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from encoder.errors import DeadlinePassed, EncoderError, NotReady, Overloaded
from encoder.fair_queue import FairQueue

Item = TypeVar("Item")


class Forwarded(Protocol):
    """What a forward returns: vectors float32 [n, D] and how they were computed.

    `tokens`: patch features of each item, float32 [t, F]; empty when nobody asked for them.
    """

    @property
    def vectors(self) -> np.ndarray: ...
    @property
    def attention_backend(self) -> str: ...
    @property
    def runner(self) -> str: ...
    @property
    def fallback_reason(self) -> str | None: ...
    @property
    def tokens(self) -> Sequence[np.ndarray]: ...


@dataclass(frozen=True)
class BatchedRow:
    """One item's row of a forward; times in milliseconds, `batch_size` items shared the forward."""

    vector: np.ndarray
    queue_ms: float
    forward_ms: float
    batch_size: int
    attention_backend: str
    runner: str
    fallback_reason: str | None
    tokens: np.ndarray | None = None


@dataclass(eq=False)
class _Waiting(Generic[Item]):
    item: Item
    answer: asyncio.Future[BatchedRow]
    deadline: float | None
    arrived: float


class Batcher(Generic[Item]):
    """Gathers items for one forward function.

    `forward` takes at most `max_batch` items and runs on the batcher's own thread, never twice at once.
    `max_waiting` bounds the queue; beyond it `submit` raises Overloaded. `plan` is given the next items, `max_batch` at
    most, and says which places of them go together now, the first among them; without it all do.
    """

    def __init__(
        self,
        forward: Callable[[Sequence[Item]], Forwarded],
        *,
        max_batch: int,
        max_waiting: int = 1024,
        plan: Callable[[Sequence[Item]], Sequence[int]] | None = None,
    ) -> None:
        if max_batch < 1 or max_waiting < 1:
            raise ValueError(f"max_batch={max_batch} and max_waiting={max_waiting} must be at least 1")
        self._forward = forward
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._plan = plan
        self._waiting: FairQueue[_Waiting[Item]] = FairQueue()
        self._arrived = asyncio.Event()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="forward")
        self._worker: asyncio.Task[None] | None = None
        self._closed = False

    @property
    def waiting(self) -> int:
        """Items that wait for the device now."""
        return len(self._waiting)

    def oldest_wait_s(self) -> float:
        """How long the item that waits longest for the device has been waiting; 0 when none does."""
        arrived = [entry.arrived for entry in self._waiting if not entry.answer.done()]
        return asyncio.get_running_loop().time() - min(arrived) if arrived else 0.0

    async def submit(self, item: Item, deadline: float | None = None, caller: Hashable = None) -> BatchedRow:
        """The item's row, once its forward is through.

        Items of one `caller` stay in order and take turns with those of others. `deadline` is a time of the running
        loop's clock. Raises Overloaded when too much waits, DeadlinePassed when the deadline goes by before the forward
        starts, NotReady after `close`, and what the forward raised for it.
        """
        if self._closed:
            raise NotReady("this replica is shutting down: try another one")
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(f"{len(self._waiting)} items wait for the device already: try again later")
        loop = asyncio.get_running_loop()
        if self._worker is None:
            self._worker = loop.create_task(self._run(), name="batcher")
        entry = _Waiting(item, loop.create_future(), deadline, loop.time())
        self._waiting.push(caller, entry)
        self._arrived.set()
        return await entry.answer

    async def call(self, function: Callable[[], object]) -> object:
        """Runs `function` on the forward thread, after the forward that is under way."""
        if self._closed:
            raise NotReady("this replica is shutting down: try another one")
        return await asyncio.get_running_loop().run_in_executor(self._thread, function)

    async def close(self) -> None:
        """Refuses what waits, lets the forward under way end, and ends the thread."""
        self._closed = True
        for entry in self._waiting.drain():
            _refuse(entry, NotReady("this replica is shutting down: try another one"))
        self._arrived.set()
        if self._worker is not None:
            await self._worker
        await asyncio.get_running_loop().run_in_executor(None, self._thread.shutdown)

    async def _run(self) -> None:
        while not self._closed:
            await self._arrived.wait()
            self._arrived.clear()
            while batch := self._take():
                await self._answer(batch)

    def _take(self) -> list[_Waiting[Item]]:
        """The next batch, without those that need no answer any more; empty when nobody waits."""
        while candidates := self._waiting.first(self._max_batch):
            stale = [(caller, entry) for caller, entry in candidates if _is_stale(entry)]
            if stale:
                self._waiting.take(stale)
                continue
            entries = [entry for _, entry in candidates]
            places = self._plan([entry.item for entry in entries]) if self._plan else range(len(entries))
            self._waiting.take(candidates[place] for place in places)
            return [entries[place] for place in places]
        return []

    async def _answer(self, batch: list[_Waiting[Item]]) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            result, forward_ms = await loop.run_in_executor(self._thread, self._timed_forward, batch)
        except Exception as error:
            if len(batch) == 1:
                _refuse(batch[0], error)
                return
            for entry in batch:
                await self._answer([entry])
            return
        features: Sequence[np.ndarray | None] = result.tokens if result.tokens else [None] * len(batch)
        for entry, vector, tokens in zip(batch, result.vectors, features, strict=True):
            if not entry.answer.done():
                entry.answer.set_result(
                    BatchedRow(
                        vector=vector,
                        queue_ms=(started - entry.arrived) * 1e3,
                        forward_ms=forward_ms,
                        batch_size=len(batch),
                        attention_backend=result.attention_backend,
                        runner=result.runner,
                        fallback_reason=result.fallback_reason,
                        tokens=tokens,
                    )
                )

    def _timed_forward(self, batch: list[_Waiting[Item]]) -> tuple[Forwarded, float]:
        started = time.perf_counter()
        result = self._forward([entry.item for entry in batch])
        elapsed_ms = (time.perf_counter() - started) * 1e3
        if len(result.vectors) != len(batch):
            raise EncoderError(f"the forward gave {len(result.vectors)} vectors for {len(batch)} items")
        if result.tokens and len(result.tokens) != len(batch):
            raise EncoderError(f"the forward gave features of {len(result.tokens)} items for {len(batch)}")
        return result, elapsed_ms


def _refuse(entry: "_Waiting[Item]", error: Exception) -> None:
    if not entry.answer.done():
        entry.answer.set_exception(error)


def _is_stale(entry: "_Waiting[Item]") -> bool:
    """Whether its caller has gone, or its deadline has, which it is told."""
    late = entry.deadline is not None and asyncio.get_running_loop().time() >= entry.deadline
    if late:
        _refuse(entry, DeadlinePassed("the deadline went by while the item waited for the device"))
    return entry.answer.done()
