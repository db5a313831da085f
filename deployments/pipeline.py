"""Items through one engine: prepare on a bounded thread pool, forward on the batcher's own threads.

Belongs to one event loop. An item's own error comes back in its Outcome; what concerns the whole call (`CALL_ERRORS`)
is raised. Cancelling a call (its client has gone, its deadline went by) takes its items out of both queues.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from deployments.outcomes import Outcome
from deployments.settings import PoolSettings
from deployments.wire import INTERNAL_MESSAGE, Overflow
from encoder.batching import Batcher, Forwarded
from encoder.engine import RawPixels
from encoder.errors import EncoderError, NotReady, Overloaded, without_traceback

if TYPE_CHECKING:
    from encoder.preprocess.text import TokenizedText
    from encoder.report import ModelInfo, Report

logger = logging.getLogger(__name__)
Result = TypeVar("Result")
CALL_ERRORS = (Overloaded, NotReady)


class NamedBackend(Protocol):
    """The decision about the attention backend, as far as a response names it."""

    @property
    def name(self) -> str: ...


class ServedEngine(Protocol):
    """What serving asks of `encoder.engine.Engine`."""

    info: "ModelInfo"

    @property
    def resolved(self) -> NamedBackend: ...
    def prepare_image(self, source: bytes | RawPixels) -> Any: ...
    def prepare_text(self, text: str, overflow: Overflow) -> "TokenizedText": ...
    def grid_of(self, item: Any) -> tuple[int, ...]: ...
    def plan_batch(self, items: Sequence[Any]) -> Sequence[int]: ...
    @property
    def lanes(self) -> int: ...
    @property
    def takes_ahead(self) -> bool: ...
    def shares_processors(self, preparing: int) -> bool: ...
    @property
    def lane_batch(self) -> int: ...
    def forward(self, items: Sequence[Any], *, tokens: bool = False, alone: bool = True) -> Forwarded: ...
    def probe(self) -> None: ...
    def count(self, counter: str, amount: int = 1) -> None: ...
    def report(self) -> "Report": ...
    def close(self) -> None: ...


@dataclass(frozen=True)
class _Asked:
    """An item on its way through the batcher; `tokens`: whether its patch features are wanted."""

    item: Any
    tokens: bool


@dataclass(frozen=True)
class PreparedImage:
    """A picture that is ready for the device; `grid`: the shape of its patch features."""

    item: Any
    prepared_at: float
    grid: tuple[int, ...]


class Caller:
    """One call, or one stream: callers take turns at the device, and hold only a few of the prepare threads."""

    def __init__(self, preparing: int) -> None:
        self.preparing = asyncio.Semaphore(preparing)


class Pipeline:
    """Owns the threads of one replica; ended with `close`."""

    def __init__(self, engine: ServedEngine, settings: PoolSettings) -> None:
        self._engine = engine
        self._health_period_s = settings.health_period_s
        self._health_timeout_s = settings.health_forward_timeout_s
        self._workers = ThreadPoolExecutor(settings.decode_threads, thread_name_prefix="prepare")
        # One that waits behind each that runs keeps the threads busy; more would be in other callers' way.
        self._preparing_at_once = 2 * settings.decode_threads
        self._batcher: Batcher[_Asked] = Batcher(
            self._forward,
            max_batch=engine.lane_batch,
            lanes=engine.lanes,
            ahead=engine.takes_ahead,
            gather=engine.shares_processors(settings.decode_threads),
            max_waiting=settings.max_waiting_items,
            plan=lambda asked: engine.plan_batch([one.item for one in asked]),
        )
        # Since when each item, or request of texts, has been waiting for a prepare thread; on it, it counts still.
        self._to_prepare: dict[object, float] = {}
        self._forward_worked_at = float("-inf")
        self.ms_per_item = 0.0

    def caller(self) -> Caller:
        """A new one, for a call or a stream."""
        return Caller(self._preparing_at_once)

    async def encode_images(self, sources: Iterable[Callable[[], bytes | RawPixels]], caller: Caller) -> list[Outcome]:
        """One outcome a picture, in order; a source is read on the thread that decodes it."""
        return await _gather(self._encode_image(source, caller) for source in sources)

    async def prepare_images(
        self, sources: Iterable[Callable[[], bytes | RawPixels]], caller: Caller
    ) -> "list[PreparedImage | Outcome]":
        """Each picture ready for the device, or its Outcome when it has an error; nothing is computed yet."""
        return await _gather(self._prepare(partial(self._decode_whole, source), caller) for source in sources)

    async def features_of(self, images: "Iterable[PreparedImage | Outcome]", caller: Caller) -> list[Outcome]:
        """One outcome a picture, in order, with its patch features."""
        return await _gather(self._encode_features(image, caller) for image in images)

    async def encode_texts(self, texts: Iterable[str], overflow: Overflow, caller: Caller) -> list[Outcome]:
        """One outcome a text, in order."""
        tokenised = await self._prepare(partial(self._tokenise, texts, overflow), caller)
        return await _gather(self._encode_tokens(tokens, caller) for tokens in tokenised)

    async def check_forward(self) -> None:
        """Raises when the forward does not work: NotReady when a thread of it is stalled, else what the probe raised.

        Traffic that went through within the health period is proof enough, unless one lane's is stuck beside it.
        """
        name, limit = self._engine.info.name, self._health_timeout_s
        stalled = NotReady(f"{name}: a forward thread has not answered for {limit:g} s: it is stalled")
        if self._batcher.longest_forward_s() > limit:
            raise stalled
        if time.monotonic() - self._forward_worked_at < self._health_period_s:
            return
        try:
            async with asyncio.timeout(limit):
                await self._batcher.call(self._engine.probe)
        except TimeoutError:
            raise stalled from None
        self._forward_worked_at = time.monotonic()

    def queue_age_s(self) -> float:
        """How long the oldest item has been waiting, to be prepared or for the device; 0 when none waits."""
        now = time.monotonic()
        return max(self._batcher.oldest_wait_s(), *(now - since for since in self._to_prepare.values()), 0.0)

    async def close(self, timeout_s: float) -> None:
        """Refuses what waits, lets the forwards under way end, and gives the device back."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._batcher.close()
        except TimeoutError:
            logger.error("the forward threads did not end within %g s: left behind", timeout_s)
        else:
            self._engine.close()
        self._workers.shutdown(wait=False)

    async def _encode_image(self, source: Callable[[], bytes | RawPixels], caller: Caller) -> Outcome:
        prepared = await self._prepare(partial(self._decode, source), caller)
        if isinstance(prepared, Outcome):
            return prepared
        return await self._submit(prepared, caller)

    async def _encode_tokens(self, tokens: "TokenizedText | Outcome", caller: Caller) -> Outcome:
        if isinstance(tokens, Outcome):
            return tokens
        return await self._submit(tokens, caller, token_count=tokens.token_count, truncated=tokens.truncated)

    async def _encode_features(self, image: "PreparedImage | Outcome", caller: Caller) -> Outcome:
        if isinstance(image, Outcome):
            return image
        outcome = await self._submit(image.item, caller, tokens=True)
        return replace(outcome, prepared_at=image.prepared_at, grid=image.grid)

    async def _submit(
        self, prepared: Any, caller: Caller, *, tokens: bool = False, token_count: int = 0, truncated: bool = False
    ) -> Outcome:
        prepared_at = time.monotonic()
        try:
            row = await self._batcher.submit(_Asked(prepared, tokens), caller=caller)
        except CALL_ERRORS:
            raise
        except Exception as error:
            return Outcome(prepared_at, None, _item_error(error), token_count, truncated)
        return Outcome(prepared_at, row, None, token_count, truncated)

    async def _prepare(self, function: Callable[[], Result], caller: Caller) -> Result:
        """`function` on a prepare thread."""
        item = object()
        self._to_prepare[item] = time.monotonic()
        try:
            with self._batcher.expecting():
                async with caller.preparing:
                    return await asyncio.get_running_loop().run_in_executor(self._workers, function)
        finally:
            del self._to_prepare[item]

    def _decode(self, source: Callable[[], bytes | RawPixels]) -> Any:
        """A picture ready for the device, or its Outcome when it has an error; on a prepare thread."""
        try:
            return self._engine.prepare_image(source())
        except Exception as error:
            return Outcome(time.monotonic(), error=_item_error(error))

    def _decode_whole(self, source: Callable[[], bytes | RawPixels]) -> "PreparedImage | Outcome":
        """As `_decode`, with the shape of the picture's features; on a prepare thread."""
        prepared = self._decode(source)
        if isinstance(prepared, Outcome):
            return prepared
        return PreparedImage(prepared, time.monotonic(), self._engine.grid_of(prepared))

    def _tokenise(self, texts: Iterable[str], overflow: Overflow) -> "list[TokenizedText | Outcome]":
        """Tokens of each text, or its Outcome when it has an error; on a prepare thread."""
        prepared: list[TokenizedText | Outcome] = []
        for text in texts:
            try:
                prepared.append(self._engine.prepare_text(text, overflow))
            except Exception as error:
                prepared.append(Outcome(time.monotonic(), error=_item_error(error)))
        return prepared

    def _forward(self, items: Sequence[_Asked], alone: bool) -> Forwarded:
        """On a forward thread; features are read back only when one of the items is to have them."""
        started = time.monotonic()
        tokens = any(asked.tokens for asked in items)
        result = self._engine.forward([asked.item for asked in items], tokens=tokens, alone=alone)
        self._forward_worked_at = time.monotonic()
        side_by_side = 1 if alone else self._engine.lanes + self._engine.takes_ahead
        self.ms_per_item = (self._forward_worked_at - started) * 1e3 / len(items) / side_by_side
        return result


async def _gather(items: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """All results in order; the first error of the whole call cancels the rest and is raised."""
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(item) for item in items]
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None
    return [task.result() for task in tasks]


def _item_error(error: Exception) -> EncoderError:
    """What one item is answered with; an error that is not the project's own is logged and stays behind INTERNAL."""
    if isinstance(error, EncoderError):
        return without_traceback(error)
    logger.error("an item failed: %s", type(error).__name__, exc_info=error)
    return EncoderError(INTERNAL_MESSAGE)
