"""One client call as the router carries it: its id, its deadline, and the metadata that goes on to a pool."""

import re
import time
import uuid
from dataclasses import dataclass, field

import grpc

from deployments.router.failures import deadline_passed
from deployments.router.sections import DeadlineSettings
from deployments.router.tokens.quota import Quota

REQUEST_ID_METADATA = "x-request-id"
# The key under which Ray Serve takes a request's id over into its own logs.
SERVE_REQUEST_ID_METADATA = "request_id"
APPLICATION_METADATA = "application"
# Serve hands no deadline on to a replica, so the remaining milliseconds travel as metadata (see deployments/wire.py).
TIMEOUT_METADATA = "x-encoder-timeout-ms"
# A caller's wish for a second call when the first one takes so many milliseconds.
HEDGE_METADATA = "x-hedge-after-ms"
# W3C trace context (https://www.w3.org/TR/trace-context/). Nothing else of the client's metadata goes on.
PASSED_ON = frozenset({"traceparent", "tracestate"})

_USABLE_ID = re.compile(r"[\x21-\x7e]{1,128}")
MAX_PASSED_ON_CHARACTERS = 512

Metadata = tuple[tuple[str, str], ...]


@dataclass(slots=True)
class Call:
    """One call of a client, or one item of its stream.

    `deadline` is a time of `time.monotonic()`. `hedge_after_s`: what the caller asked for. What the router did is noted
    here for the log: pools, attempts, sizes.
    """

    method: str
    request_id: str
    deadline: float
    metadata: Metadata
    peer: str = ""
    quota: Quota = field(default_factory=Quota)
    hedge_after_s: float | None = None
    started: float = field(default_factory=time.monotonic)
    pool: str = ""
    attempts: int = 0
    items: int = 0
    bytes_in: int = 0
    bytes_out: int = 0

    def remaining_s(self) -> float:
        """Seconds until the deadline; raises DEADLINE_EXCEEDED when it has passed."""
        remaining = self.deadline - time.monotonic()
        if remaining <= 0:
            raise deadline_passed(self.pool or None)
        return remaining

    def for_item(self, default_s: float) -> "Call":
        """The call of one item of this stream: its own notes, and its own deadline within the stream's."""
        deadline = min(self.deadline, time.monotonic() + default_s)
        return Call(self.method, self.request_id, deadline, self.metadata, self.peer, self.quota, self.hedge_after_s)

    def metadata_for(self, pool: str, timeout_s: float) -> Metadata:
        """The metadata of a call to `pool` that may take `timeout_s`."""
        return (
            (APPLICATION_METADATA, pool),
            (TIMEOUT_METADATA, f"{timeout_s * 1e3:.0f}"),
            *self.metadata,
        )


def open_call(
    method: str, context: grpc.aio.ServicerContext, settings: DeadlineSettings, endless: bool = False
) -> Call:
    """Reads id, deadline, trace context and wishes of a call that came in.

    Without a deadline of the client's the default holds, or none at all when the call is `endless` (a stream).
    """
    now = time.monotonic()
    given = context.time_remaining()
    if given is None:
        deadline = float("inf") if endless else now + settings.default_s
    else:
        # Of a very short time, half is left for the pool.
        deadline = now + max(given - settings.margin_s, given / 2)
    request_id = ""
    hedge_after_s = None
    passed_on = []
    for key, value in context.invocation_metadata() or ():
        if not isinstance(value, str):
            continue
        if key == REQUEST_ID_METADATA and not request_id and _USABLE_ID.fullmatch(value):
            request_id = value
        elif key == HEDGE_METADATA:
            hedge_after_s = _seconds(value)
        elif key in PASSED_ON and len(value) <= MAX_PASSED_ON_CHARACTERS:
            passed_on.append((key, value))
    request_id = request_id or new_request_id()
    return Call(
        method,
        request_id,
        deadline,
        (*id_metadata(request_id), *passed_on),
        context.peer(),
        hedge_after_s=hedge_after_s,
        started=now,
    )


def _seconds(milliseconds: str) -> float | None:
    """What is no positive number is no wish: the call can be served without it."""
    try:
        seconds = float(milliseconds) / 1e3
    except ValueError:
        return None
    return seconds if 0 < seconds < float("inf") else None


def id_metadata(request_id: str) -> Metadata:
    """A request's id under the names that pools know."""
    return ((REQUEST_ID_METADATA, request_id), (SERVE_REQUEST_ID_METADATA, request_id))


def new_request_id() -> str:
    return uuid.uuid4().hex
