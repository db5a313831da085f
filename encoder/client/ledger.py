"""The state of one stream without its transport: which items are under way, and which are sent again."""

from __future__ import annotations

import heapq
import math
from dataclasses import dataclass

from encoder.client.errors import ItemError, ServiceError
from encoder.client.features import read_features
from encoder.client.request import EncodeCall
from encoder.client.results import StreamResult, item_error
from encoder.client.retry import Failure, RetryPolicy
from encoder.v1 import encoder_pb2 as pb

# How long to wait, when all is answered, for the service to end its side.
GOODBYE_SECONDS = 2.0


@dataclass(frozen=True)
class SourceEnded:
    """The caller's items are all read, or reading them raised `error`."""

    error: BaseException | None = None


@dataclass(frozen=True)
class CallEnded:
    """The call is over though the client has not ended it."""

    failure: Failure


# What the thread, or task, that yields waits for.
StreamEvent = pb.EncodeStreamResponse | StreamResult | SourceEnded | CallEnded


@dataclass(frozen=True)
class Outgoing:
    """An item ready to be sent. id: the caller's. source: its name in errors."""

    id: str
    index: int
    source: str
    request: pb.EncodeStreamRequest


@dataclass
class _Entry:
    item: Outgoing
    tries: int = 1


class StreamLedger:
    """Items that were sent and not yet answered. Not thread safe.

    On the wire an item's id is its index, so that ids of the caller that are equal do no harm.
    """

    def __init__(self, call: EncodeCall, policy: RetryPolicy) -> None:
        self.call = call
        self._policy = policy
        self._entries: dict[int, _Entry] = {}
        self._later: list[tuple[float, int]] = []
        self._failed_calls = 0

    def __len__(self) -> int:
        return len(self._entries)

    def prepare(self, index: int, item: object) -> Outgoing | StreamResult:
        """What is to be sent for a caller's item, `item` or `(id, item)`; or its failure. Blocks; uses no state."""
        name = str(index)
        if isinstance(item, tuple) and len(item) == 2 and isinstance(item[0], str):
            name, item = item
        source = self.call.source(index, item)
        if isinstance(source, ItemError):
            return StreamResult(name, index, error=source)
        payload = source.load()
        if isinstance(payload, ItemError):
            return StreamResult(name, index, error=payload)
        request = pb.EncodeStreamRequest(id=str(index), options=self.call.options)
        if isinstance(payload, str):
            request.text = payload
        else:
            request.image.CopyFrom(payload)
        return Outgoing(name, index, source.name, request)

    def admit(self, item: Outgoing) -> None:
        """Notes an item that is about to be sent."""
        self._entries[item.index] = _Entry(item)

    def unanswered(self) -> list[pb.EncodeStreamRequest]:
        """What a new call must send again after the old one broke, without what waits for its pause to end."""
        later = {index for _, index in self._later}
        return [entry.item.request for index, entry in self._entries.items() if index not in later]

    def settle(self, response: pb.EncodeStreamResponse, now: float, remaining: float) -> StreamResult | None:
        """The result that an answer brings; None: a full queue or the like, the item will be due again.

        Raises ServiceError for an answer to what was not asked.
        """
        index = int(response.id) if response.id.isdecimal() else -1
        entry = self._entries.get(index)
        if entry is None:
            raise ServiceError(
                "INTERNAL", f"an answer to id {response.id!r}, which is not open: the service is at fault"
            )
        self._failed_calls = 0
        if response.WhichOneof("outcome") == "error":
            pause = self._policy.pause(Failure.of_status(response.error), entry.tries, remaining)
            if pause is not None:
                entry.tries += 1
                heapq.heappush(self._later, (now + pause, index))
                return None
        del self._entries[index]
        return self._result(entry.item, response)

    def _result(self, item: Outgoing, response: pb.EncodeStreamResponse) -> StreamResult:
        form, options = self.call.form, self.call.options
        error = item_error(item.index, item.source, response, form, options.output, options.dimensions)
        outcome = None if error else response.WhichOneof("outcome")
        embedding, features = response.embedding, response.features
        return StreamResult(
            id=item.id,
            index=item.index,
            vector=form.rows([embedding.values], embedding.dimensions)[0] if outcome == "embedding" else None,
            dimensions=0 if error else embedding.dimensions or features.dimensions,
            scale=0.0 if error else embedding.scale,
            error=error,
            provenance=response.provenance,
            timings=response.timings,
            token_count=response.token_count,
            truncated=response.truncated,
            features=read_features(features, form) if outcome == "features" else None,
        )

    def due(self, now: float) -> list[pb.EncodeStreamRequest]:
        """Items whose pause is over; each is returned once."""
        ready: list[pb.EncodeStreamRequest] = []
        while self._later and self._later[0][0] <= now:
            _, index = heapq.heappop(self._later)
            ready.append(self._entries[index].item.request)
        return ready

    def seconds_to_due(self, now: float) -> float:
        """Until the next item is due; math.inf when none waits."""
        return max(0.0, self._later[0][0] - now) if self._later else math.inf

    def pause_after(self, failure: Failure, remaining: float) -> float | None:
        """Seconds until a broken call may be opened anew; None: give up. Answers in between reset the count."""
        self._failed_calls += 1
        return self._policy.pause(failure, self._failed_calls, remaining)
