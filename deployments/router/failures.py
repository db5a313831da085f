"""What a failed call to a pool means, and what the client is told of it: one clean line, nothing of the inside.

Sources of the texts that are looked for: Ray 2.60 (`serve/_private/proxy.py`, `serve/_private/grpc_util.py`,
`serve/_private/haproxy_templates.py`, `exceptions.py`) and the gRPC core's own status messages.
"""

import re
from dataclasses import dataclass

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from deployments.router.pick import Refusal

STATUS_DETAILS_METADATA = "grpc-status-details-bin"
# Trailers travel in one HTTP/2 header block, commonly of 8 KiB.
MAX_DETAILS_CHARACTERS = 512
MAX_STATUS_BYTES = 4096

_Code = grpc.StatusCode
# What a pool says under these codes is about the request, and meant for its caller.
_ABOUT_THE_REQUEST = {
    _Code.INVALID_ARGUMENT,
    _Code.NOT_FOUND,
    _Code.ALREADY_EXISTS,
    _Code.PERMISSION_DENIED,
    _Code.RESOURCE_EXHAUSTED,
    _Code.FAILED_PRECONDITION,
    _Code.OUT_OF_RANGE,
    _Code.UNIMPLEMENTED,
    _Code.UNAUTHENTICATED,
}

_TRACE = re.compile(r"Traceback \(most recent call last\)|ray::|\bFile \".*\", line \d+")
_REPLICA_DIED = re.compile(
    r"Actor(?:Died|Unavailable)Error|RayActorError|WorkerCrashedError|(?:Node|LocalRaylet|Owner)DiedError|AsyncioActorExit"
    r"|ReplicaUnavailableError|\b(?:actor|worker|replica|raylet|node)\b[^.]{0,60}\b(?:died|dead|crashed|was killed)\b"
    r"|The actor experienced an error before finishing|Replica .{0,160} is no longer available",
    re.IGNORECASE | re.DOTALL,
)
_CONNECTION_LOST = re.compile(
    r"RST_STREAM|GOAWAY|Connection reset|Connection refused|Broken pipe|Socket closed|Stream removed"
    r"|failed to connect|connections to all backends failing|recvmsg|sendmsg|DNS resolution|transport|keepalive"
    # HAProxy's own answer for a replica that went away, seen as UNKNOWN with status 500.
    r"|http2 header with status: 5\d\d",
    re.IGNORECASE,
)
# Of these, what ends a call that was under way: the replica, or what stood before it, may have died of it.
_LOST_UNDER_WAY = re.compile(
    r"RST_STREAM|Connection reset|Broken pipe|Socket closed|Stream removed|recvmsg|sendmsg"
    r"|http2 header with status: 50[02]",
    re.IGNORECASE,
)
# Not RST_STREAM 7 (REFUSED_STREAM): HAProxy says it of a replica that died under the call, too.
_NOT_BEGUN = re.compile(r"failed to connect|Connection refused|GOAWAY", re.IGNORECASE)
_NO_APPLICATION = re.compile(r"Application .{0,160}not (?:found|set)|ListApplications", re.DOTALL)
_TOO_LARGE = re.compile(r"message larger than max", re.IGNORECASE)
# What gRPC's blocking and asyncio servers say when protobuf cannot read a request.
_UNREADABLE = re.compile(
    r"Exception deserializing request|Failed to parse|Error parsing message with type '[\w.]+Request'", re.IGNORECASE
)
_INSIDE = (
    (re.compile(r"\b(?:pid|ip|actor_id|node_id|worker_id|task_id|repr)\s*[=:]\s*[^\s,)]+,?\s*"), ""),
    (re.compile(r"\b(?:ipv[46]|unix|dns|tcp|https?)://?/?\S+|\bipv[46]:\S+"), "(address)"),
    (re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}(?::\d+)?\b"), "(address)"),
    (re.compile(r"\[[0-9a-fA-F:]*:[0-9a-fA-F:]*\](?::\d+)?"), "(address)"),
    (re.compile(r"\blocalhost(?::\d+)?\b"), "(address)"),
    (re.compile(r"\bpid \d+\b"), "a process"),
    (re.compile(r"\b[0-9a-f]{24,}\b"), "(id)"),
    (re.compile(r"(?<![\w.])/(?:[\w.@-]+/)+[\w.@-]+"), "(path)"),
)


class RouterError(Exception):
    """A failure as the client sees it: code, one line, and the details of a google.rpc.Status if there are any."""

    def __init__(self, code: grpc.StatusCode, message: str, status: status_pb2.Status | None = None) -> None:
        super().__init__(message)
        self.code = code
        self.message = message
        self._status = status

    def status(self) -> status_pb2.Status:
        """The failure as a google.rpc.Status."""
        if self._status is not None:
            return self._status
        return status_pb2.Status(code=self.code.value[0], message=self.message)

    def trailers(self) -> tuple[tuple[str, bytes], ...]:
        """The trailing metadata that carries the rich status; empty when there is nothing to add."""
        if self._status is None:
            return ()
        return ((STATUS_DETAILS_METADATA, self._status.SerializeToString()),)


@dataclass(frozen=True, slots=True)
class PoolFailure:
    """How one call to a pool failed.

    `retryable`: another try may succeed. `doubtful`: it speaks against the pool, which should be probed. `died`: the
    replica was lost while it worked on the call. `retry_after_s`: what the pool asked for. `cause`: for the log;
    addresses are kept, what a caller sent is not.
    """

    error: RouterError
    retryable: bool
    doubtful: bool
    died: bool
    retry_after_s: float
    cause: str


def refused(refusal: Refusal) -> RouterError:
    return RouterError(refusal.code, refusal.message)


def with_retry_delay(code: grpc.StatusCode, message: str, delay_s: float) -> status_pb2.Status:
    """A status with google.rpc.RetryInfo."""
    delay = duration_pb2.Duration()
    delay.FromMilliseconds(max(1, round(delay_s * 1e3)))
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
    return status_pb2.Status(code=code.value[0], message=message, details=[packed])


def deadline_passed(pool: str | None) -> RouterError:
    """The deadline went by, in `pool` or before any pool was asked."""
    where = f"while pool {pool!r} worked on it" if pool else "before a pool could be asked"
    return RouterError(_Code.DEADLINE_EXCEEDED, f"the deadline passed {where}: allow more time or send fewer items")


def read_failure(error: grpc.aio.AioRpcError, pool: str, address: str) -> PoolFailure:
    """Interprets a failed call to `pool`, which is reached at `address` (never told to the client)."""
    details = error.details() or ""
    rich = _rich_status(error)
    code, message, retryable = _meaning(error.code(), details, pool, address)
    kept = None
    # A rich status belongs to the code it came with.
    if rich is not None and code is error.code():
        kept = _clean_status(rich, code, message)
    # A full queue says nothing against the pool; a deadline may have been too short, but may also be a hung pool.
    doubtful = code in (_Code.UNAVAILABLE, _Code.INTERNAL, _Code.DEADLINE_EXCEEDED)
    return PoolFailure(
        RouterError(code, message, kept),
        retryable,
        doubtful,
        _died(code, details),
        _retry_delay_s(rich),
        _cause(error.code(), details),
    )


def _meaning(code: grpc.StatusCode, details: str, pool: str, address: str) -> tuple[grpc.StatusCode, str, bool]:
    """What the client is told (code, message), and whether another try may succeed."""
    if code is _Code.NOT_FOUND and _NO_APPLICATION.search(details):
        return _Code.UNAVAILABLE, f"pool {pool!r} is not deployed where the router expects it: try again later", True
    if code is _Code.RESOURCE_EXHAUSTED:
        if _TOO_LARGE.search(details):
            return code, f"a message is larger than pool {pool!r} or the router takes: send fewer items a call", False
        return code, clean(details, address) or f"pool {pool!r} has too much to do: try again later", True
    if code is _Code.DEADLINE_EXCEEDED:
        return code, deadline_passed(pool).message, False
    if code in _ABOUT_THE_REQUEST:
        return code, clean(details, address) or f"pool {pool!r} refused the request", False
    if _REPLICA_DIED.search(details):
        return _Code.UNAVAILABLE, f"a replica of pool {pool!r} died while it worked on this: try again", True
    # CANCELLED by somebody else than this router: a proxy or a replica that went away.
    if code in (_Code.UNAVAILABLE, _Code.CANCELLED, _Code.ABORTED) or _CONNECTION_LOST.search(details):
        said = "" if _CONNECTION_LOST.search(details) else clean(details, address)
        reason = f" ({said})" if said and code is _Code.UNAVAILABLE else ""
        return _Code.UNAVAILABLE, f"pool {pool!r} is not available{reason}: try again later", True
    if _UNREADABLE.search(details):
        return _Code.INVALID_ARGUMENT, "the request cannot be parsed: it is no valid message of its kind", False
    said = clean(details, address)
    return _Code.INTERNAL, f"pool {pool!r} failed" + (f": {said}" if said else ""), False


def _died(code: grpc.StatusCode, details: str) -> bool:
    """Whether a replica was lost while it worked on the call; `code` is what the client is told."""
    if code is not _Code.UNAVAILABLE or _NOT_BEGUN.search(details):
        return False
    return bool(_REPLICA_DIED.search(details) or _LOST_UNDER_WAY.search(details))


def _cause(code: grpc.StatusCode, details: str) -> str:
    # What is about the request, and a trace with its values, may quote the request: the log gets neither.
    if code in _ABOUT_THE_REQUEST and not _NO_APPLICATION.search(details):
        return code.name
    if _TRACE.search(details):
        return f"{code.name}: {clean(details)} (the trace is in the pool's own log)"
    return f"{code.name}: {' '.join(details.split())[:MAX_DETAILS_CHARACTERS]}"


def clean(details: str, address: str = "") -> str:
    """One short line without tracebacks, addresses, process ids and paths; of a traceback only the error's name."""
    if _TRACE.search(details):
        names = re.findall(r"^(?:[\w.]*\.)?([A-Z]\w*(?:Error|Exception|Exit|Interrupt))\b", details, re.MULTILINE)
        return names[-1] if names else ""
    line = " ".join(re.sub(r"\x1b\[[0-9;]*m", "", details).split())
    if address:
        line = line.replace(address, "(address)")
    for pattern, instead in _INSIDE:
        line = pattern.sub(instead, line)
    return line if len(line) <= MAX_DETAILS_CHARACTERS else line[: MAX_DETAILS_CHARACTERS - 1] + "…"


def _rich_status(error: grpc.aio.AioRpcError) -> status_pb2.Status | None:
    for key, value in error.trailing_metadata() or ():
        if key == STATUS_DETAILS_METADATA and isinstance(value, bytes):
            try:
                return status_pb2.Status.FromString(value)
            except DecodeError:
                return None
    return None


def _clean_status(status: status_pb2.Status, code: grpc.StatusCode, message: str) -> status_pb2.Status | None:
    """The same with the cleaned message (clients compare them), without stack traces; None when nothing is left."""
    details = [item for item in status.details if not item.Is(error_details_pb2.DebugInfo.DESCRIPTOR)]
    cleaned = status_pb2.Status(code=code.value[0], message=message, details=details)
    return cleaned if details and cleaned.ByteSize() <= MAX_STATUS_BYTES else None


def _retry_delay_s(status: status_pb2.Status | None) -> float:
    for item in status.details if status is not None else ():
        info = error_details_pb2.RetryInfo()
        if item.Is(info.DESCRIPTOR) and item.Unpack(info):
            return max(0.0, info.retry_delay.ToTimedelta().total_seconds())
    return 0.0
