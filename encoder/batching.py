"""The batcher: what waits goes to the device as soon as the device is free; no timer.

One event loop owns the queue. A device may have lanes, forwards that run side by side: each has a task and a thread of
its own, and what waits is shared out among those that are free; an item that is alone gets the whole device. A device
that takes batches ahead is given one while it computes another, but only a full one, which nothing that comes later
could join. One that shares its processors with the decoding of what is on its way lets that join a batch, once it has
been idle. Callers take turns, so that a big request does not starve a small one, and of what is next a plan says what
goes together. An item that was cancelled, or is past its deadline, is dropped before it costs device time. A forward
that fails is tried again item by item, so that one bad item fails alone.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np

from encoder.errors import DeadlinePassed, EncoderError, NotReady, Overloaded
from encoder.fair_queue import FairQueue

logger = logging.getLogger(__name__)
Item = TypeVar("Item")
Result = TypeVar("Result")


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

    `forward` takes at most `max_batch` items, and whether nothing else will run meanwhile; it runs on threads of the
    batcher's own, one for each of the `lanes`. `ahead`: a device of one lane may be given a batch while it computes the
    one before. `gather`: a device that was idle waits for what is on its way, see `expecting`. `max_waiting` bounds the
    queue; beyond it `submit` raises Overloaded. `plan` is given the next items,
    `max_batch` at most, and says which places of them go together now, the first among them; without it all do.
    """

    def __init__(
        self,
        forward: Callable[[Sequence[Item], bool], Forwarded],
        *,
        max_batch: int,
        lanes: int = 1,
        ahead: bool = False,
        gather: bool = False,
        max_waiting: int = 1024,
        plan: Callable[[Sequence[Item]], Sequence[int]] | None = None,
    ) -> None:
        if max_batch < 1 or lanes < 1 or max_waiting < 1:
            raise ValueError(f"{max_batch=}, {lanes=} and {max_waiting=} must be at least 1")
        if ahead and lanes > 1:
            raise ValueError(f"a device of {lanes} lanes takes nothing ahead")
        self._forward = forward
        self._max_batch = max_batch
        self._max_waiting = max_waiting
        self._plan = plan
        self._ahead = ahead
        self._waiting: FairQueue[_Waiting[Item]] = FairQueue()
        self._changed = asyncio.Event()
        self._threads = [ThreadPoolExecutor(1, thread_name_prefix=f"forward-{lane}") for lane in range(lanes + ahead)]
        self._workers: list[asyncio.Task[None]] = []
        # Since when each lane's forward runs, by the loop's clock.
        self._running: dict[int, float] = {}
        self._alone = False
        self._closed = False
        self._gathers = gather
        # Since when each of those that are on their way has been, the youngest last.
        self._expected: dict[object, float] = {}
        # Of the last forward, over its items.
        self._item_s = 0.0

    @property
    def waiting(self) -> int:
        """Items that wait for the device now."""
        return len(self._waiting)

    def oldest_wait_s(self) -> float:
        """How long the item that waits longest for the device has been waiting; 0 when none does."""
        arrived = [entry.arrived for entry in self._waiting if not entry.answer.done()]
        return asyncio.get_running_loop().time() - min(arrived) if arrived else 0.0

    def longest_forward_s(self) -> float:
        """How long the oldest of the forwards that are under way has been running; 0 when none is."""
        return asyncio.get_running_loop().time() - min(self._running.values()) if self._running else 0.0

    @contextmanager
    def expecting(self) -> Iterator[None]:
        """Around the way of an item, or of a few, up to where they are submitted or given up."""
        if not self._gathers:
            yield
            return
        self._expected[coming := object()] = asyncio.get_running_loop().time()
        try:
            yield
        finally:
            del self._expected[coming]
            self._changed.set()

    async def submit(self, item: Item, deadline: float | None = None, caller: Hashable = None) -> BatchedRow:
        """The item's row, once its forward is through.

        Items of one `caller` stay in order and take turns with those of others. `deadline` is a time of the running
        loop's clock. Raises Overloaded when too much waits, DeadlinePassed when the deadline goes by before the forward
        starts, NotReady after `close`, and what the forward raised for it.
        """
        if self._closed:
            raise _shutting_down()
        if len(self._waiting) >= self._max_waiting:
            raise Overloaded(f"{len(self._waiting)} items wait for the device already: try again later")
        loop = asyncio.get_running_loop()
        if not self._workers:
            self._workers = [
                loop.create_task(self._run(lane), name=f"batcher-{lane}") for lane in range(len(self._threads))
            ]
        entry = _Waiting(item, loop.create_future(), deadline, loop.time())
        self._waiting.push(caller, entry)
        self._changed.set()
        return await entry.answer

    async def call(self, function: Callable[[], Result]) -> list[Result]:
        """Runs `function` on the thread of each lane, after the forward that is under way there."""
        if self._closed:
            raise _shutting_down()
        loop = asyncio.get_running_loop()
        return list(await asyncio.gather(*(loop.run_in_executor(thread, function) for thread in self._threads)))

    async def close(self) -> None:
        """Refuses what waits, lets the forwards under way end, and ends the threads.

        Cancelled, it waits for no forward any more, and refuses what is under way; idle threads end all the same.
        """
        self._closed = True
        for entry in self._waiting.drain():
            _refuse(entry, _shutting_down())
        self._changed.set()
        try:
            await asyncio.gather(*self._workers)
        finally:
            for thread in self._threads:
                thread.shutdown(wait=False)
        for thread in self._threads:
            await asyncio.get_running_loop().run_in_executor(None, thread.shutdown)

    async def _run(self, lane: int) -> None:
        await self._gather()
        while not self._closed:
            if batch := self._take():
                await self._forward_on(lane, batch)
            else:
                self._changed.clear()
                await self._changed.wait()
                await self._gather()

    async def _gather(self) -> None:
        """Lets what is on its way join the items that wait, until the free lanes have all they take.

        No longer than the forward of those that wait is likely to take, so that nobody's time is more than doubled; and
        not for what has been on its way for longer than that, such as a huge picture.
        Without it the first picture of a request would be computed alone, with the decoding of the others in its way:
        measured with ViT-B/32 on two cores with AMX, one of 8 took 106 ms and takes 86 ms, one of 32 took 290 and 253.
        """
        loop = asyncio.get_running_loop()
        began = loop.time()
        while self._expected and 0 < len(self._waiting) < self._max_batch * self._free_lanes:
            youngest = next(reversed(self._expected.values()))
            left = min(began, youngest) + len(self._waiting) * self._item_s - loop.time()
            if left <= 0:
                return
            self._changed.clear()
            with suppress(TimeoutError):
                async with asyncio.timeout(left):
                    await self._changed.wait()

    @property
    def _free_lanes(self) -> int:
        return len(self._threads) - len(self._running)

    def _take(self) -> list[_Waiting[Item]]:
        """The next batch, without those that need no answer any more; empty when nobody waits, or one has it all."""
        while not self._alone and (candidates := self._waiting.first(self._share())):
            stale = [(caller, entry) for caller, entry in candidates if _is_stale(entry)]
            if stale:
                self._waiting.take(stale)
                continue
            entries = [entry for _, entry in candidates]
            places = self._places([entry.item for entry in entries])
            self._waiting.take(candidates[place] for place in places)
            return [entries[place] for place in places]
        return []

    def _places(self, items: Sequence[Item]) -> Sequence[int]:
        if self._plan is None:
            return range(len(items))
        try:
            return self._plan(items)
        except Exception:
            # Without a plan vectors are as right; a lane that ends would leave everybody waiting.
            logger.exception("the plan of a batch failed: %d items go together", len(items))
            return range(len(items))

    def _share(self) -> int:
        """How many of those that wait are for one of the lanes that are free; ahead, a full batch or none."""
        if self._ahead:
            return self._max_batch if not self._running or len(self._waiting) >= self._max_batch else 0
        return min(self._max_batch, -(-len(self._waiting) // self._free_lanes))

    async def _forward_on(self, lane: int, batch: list[_Waiting[Item]]) -> None:
        """The batch through a lane, or through the whole device when it is one item and nothing else is about."""
        one_lane = len(self._threads) == 1 or self._ahead
        alone = not self._running and (one_lane or (len(batch) == 1 and not self._waiting))
        self._alone = alone and not self._ahead
        self._running[lane] = asyncio.get_running_loop().time()
        try:
            await self._answer(lane, batch, alone)
        except asyncio.CancelledError:
            for entry in batch:
                _refuse(entry, _shutting_down())
            raise
        finally:
            del self._running[lane]
            if self._alone:
                self._alone = False
                self._changed.set()  # the other lanes may have found the device taken

    async def _answer(self, lane: int, batch: list[_Waiting[Item]], alone: bool) -> None:
        loop = asyncio.get_running_loop()
        started = loop.time()
        try:
            result, forward_ms = await loop.run_in_executor(self._threads[lane], self._timed_forward, batch, alone)
        except Exception as error:
            if len(batch) == 1:
                _refuse(batch[0], error)
                return
            for entry in batch:
                if not _is_stale(entry):
                    await self._answer(lane, [entry], alone)
            return
        self._item_s = forward_ms / 1e3 / len(batch)
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

    def _timed_forward(self, batch: list[_Waiting[Item]], alone: bool) -> tuple[Forwarded, float]:
        started = time.perf_counter()
        try:
            result = self._forward([entry.item for entry in batch], alone)
        except StopIteration as error:  # a future takes none: whoever waits for it would wait for ever
            raise EncoderError("the forward gave up with StopIteration") from error
        elapsed_ms = (time.perf_counter() - started) * 1e3
        if len(result.vectors) != len(batch):
            raise EncoderError(f"the forward gave {len(result.vectors)} vectors for {len(batch)} items")
        if result.tokens and len(result.tokens) != len(batch):
            raise EncoderError(f"the forward gave features of {len(result.tokens)} items for {len(batch)}")
        return result, elapsed_ms


def _shutting_down() -> NotReady:
    return NotReady("this replica is shutting down: try another one")


def _refuse(entry: "_Waiting[Item]", error: Exception) -> None:
    if not entry.answer.done():
        entry.answer.set_exception(error)


def _is_stale(entry: "_Waiting[Item]") -> bool:
    """Whether its caller has gone, or its deadline has, which it is told."""
    late = entry.deadline is not None and asyncio.get_running_loop().time() >= entry.deadline
    if late:
        _refuse(entry, DeadlinePassed("the deadline went by while the item waited for the device"))
    return entry.answer.done()
