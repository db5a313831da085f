"""When a failed call is sent again: which codes, after what pause, within which deadline."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from encoder.client.errors import is_message_too_large

CODE_NAMES: dict[int, str] = {code.value[0]: code.name for code in grpc.StatusCode}
_STATUS_TRAILER = "grpc-status-details-bin"
_MAX_DOUBLINGS = 30


@dataclass(frozen=True)
class Failure:
    """How a call, or an item of a stream, ended. retry_after: seconds from google.rpc.RetryInfo, or None."""

    code: str
    details: str
    retry_after: float | None = None

    @classmethod
    def of_call(cls, error: grpc.RpcError) -> Failure:
        """From what grpc or grpc.aio raised."""
        return cls.of_parts(error.code(), error.details(), error.trailing_metadata())

    @classmethod
    def of_parts(cls, code: grpc.StatusCode, details: str | None, trailers: object) -> Failure:
        """From the parts of a call's status; trailers: the trailing metadata."""
        return cls(code.name, details or "", _retry_after_of_call(trailers))

    @classmethod
    def of_status(cls, status: status_pb2.Status) -> Failure:
        """From a google.rpc.Status inside a response."""
        return cls(CODE_NAMES.get(status.code, "UNKNOWN"), status.message, _retry_after(status))

    @classmethod
    def early_end(cls) -> Failure:
        """A stream that the service ended well, before the client did: it drains."""
        return cls("UNAVAILABLE", "the service ended the stream early")

    @property
    def passing(self) -> bool:
        """Whether the same request may succeed a little later."""
        if self.code == "RESOURCE_EXHAUSTED":
            return not is_message_too_large(self.details)
        return self.code == "UNAVAILABLE"


def _retry_after_of_call(trailers: object) -> float | None:
    # Pairs from grpc and from grpc.aio alike, whatever the type stubs say.
    for key, value in cast("Iterable[tuple[str, bytes]]", trailers or ()):
        if key == _STATUS_TRAILER:
            try:
                return _retry_after(status_pb2.Status.FromString(value))
            except DecodeError:
                return None
    return None


def _retry_after(status: status_pb2.Status) -> float | None:
    for detail in status.details:
        info = error_details_pb2.RetryInfo()
        if detail.Is(info.DESCRIPTOR):
            try:
                detail.Unpack(info)
            except DecodeError:
                return None
            return max(0.0, info.retry_delay.seconds + info.retry_delay.nanos / 1e9)
    return None


@dataclass(frozen=True)
class RetryPolicy:
    """Exponential backoff with jitter for UNAVAILABLE and for a full queue.

    retries: how often a request is sent again. first_delay, longest_delay: seconds; the pause doubles from the first
    to the longest, and each is drawn from its upper half, so that clients do not come back all at once. A pause that
    the service asks for is kept, plus a jitter of at most the own pause.
    """

    retries: int = 5
    first_delay: float = 0.1
    longest_delay: float = 5.0

    def __post_init__(self) -> None:
        if self.retries < 0:
            raise ValueError(f"retries is {self.retries}: pass 0 or more")
        if not 0 < self.first_delay <= self.longest_delay:
            raise ValueError(
                f"first_delay is {self.first_delay}, longest_delay {self.longest_delay}: pass 0 < first <= longest"
            )

    def pause(self, failure: Failure, attempt: int, remaining: float) -> float | None:
        """Seconds to wait after the `attempt`-th try (from 1) ended so; None: do not try again.

        remaining: seconds to the deadline; no pause is begun that would end after it.
        """
        if attempt > self.retries or not failure.passing:
            return None
        own = min(self.longest_delay, self.first_delay * 2.0 ** min(attempt - 1, _MAX_DOUBLINGS))
        if failure.retry_after is None:
            pause = random.uniform(own / 2, own)
        else:
            pause = failure.retry_after + random.uniform(0, own)
        return pause if pause < remaining else None


@dataclass(frozen=True)
class Deadline:
    """A point in time `seconds` from its making; math.inf never comes."""

    seconds: float
    started: float = field(default_factory=time.monotonic)

    def remaining(self) -> float:
        return self.started + self.seconds - time.monotonic()

    def for_grpc(self) -> float | None:
        """The timeout to hand to gRPC; None: no deadline."""
        return None if math.isinf(self.seconds) else max(self.remaining(), 0.001)
