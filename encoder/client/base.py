"""What both clients have in common: their settings, their checks and the calls they prepare."""

from __future__ import annotations

import math
import threading
from collections.abc import Sized
from typing import Literal

from encoder.client.connection import DEFAULT_ADDRESS, Connection, Pem
from encoder.client.errors import ServiceError, service_error
from encoder.client.formats import FORMATS
from encoder.client.job import EncodeJob
from encoder.client.ledger import StreamLedger
from encoder.client.request import EncodeCall, Progress, Wanted, payload_limit
from encoder.client.retry import Failure, RetryPolicy
from encoder.client.sources import Kind, require_many

OnError = Literal["raise", "mask"]

HEALTH_TIMEOUT = 5.0
_KINDS = ("image", "text")
_ON_ERROR = ("raise", "mask")
_LEAST_MESSAGE_BYTES = 2**16


class ClientBase:
    """Settings of a client; EncoderClient and AsyncEncoderClient add the transport."""

    def __init__(
        self,
        address: str = DEFAULT_ADDRESS,
        *,
        model: str = "",
        token: str | None = None,
        tls: bool = False,
        root_certificates: Pem | None = None,
        client_certificate: Pem | None = None,
        client_key: Pem | None = None,
        server_name: str = "",
        timeout: float = 60.0,
        retries: int | RetryPolicy = 5,
        max_message_bytes: int = 64 * 2**20,
        batch_size: int = 32,
        concurrency: int = 4,
        keepalive: float = 60.0,
    ) -> None:
        """Makes a client; no connection is opened before the first call.

        address: host:port of a router or a replica, or any other gRPC target.
        model: model of all calls; empty: the one the service has as its default.
        token: sent as `authorization: Bearer <token>`; without TLS anybody on the way can read it.
        tls: encrypt, and trust the certificates that come with gRPC. root_certificates: trust these instead;
            client_certificate, client_key: show who the client is. Each is PEM, as bytes or as the path of a file, and
            turns TLS on. server_name: the name in the server's certificate, where it is not the address.
        timeout: seconds for one request with its retries, not for all the batches of a call; math.inf: no deadline.
        retries: how often UNAVAILABLE and a full queue are tried again, or a whole RetryPolicy.
        max_message_bytes: largest gRPC message to send or take; should be no larger than the service's own limit.
        batch_size: items in one request, at most. concurrency: requests of one call in flight, at most.
        keepalive: seconds between pings while a call is open and quiet. A router takes them every 10 s; a bare gRPC
            server may hang up on pings within 300 s, which costs a retry.

        Raises ValueError for a setting that cannot be.
        """
        self.model = model
        self._connection = Connection(
            address=address,
            token=token,
            tls=tls,
            root_certificates=root_certificates,
            client_certificate=client_certificate,
            client_key=client_key,
            server_name=server_name,
            max_message_bytes=max_message_bytes,
            keepalive=keepalive,
        )
        self._metadata = self._connection.metadata()
        self._retry = retries if isinstance(retries, RetryPolicy) else RetryPolicy(retries)
        self._timeout = _positive("timeout", timeout)
        self._batch_size = int(_positive("batch_size", batch_size))
        self._concurrency = int(_positive("concurrency", concurrency))
        self._opening = threading.Lock()
        self._closed = False
        if max_message_bytes < _LEAST_MESSAGE_BYTES:
            raise ValueError(f"max_message_bytes is {max_message_bytes}: pass {_LEAST_MESSAGE_BYTES} or more")

    @property
    def address(self) -> str:
        return self._connection.address

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.address!r}, model={self.model!r})"

    def _check_open(self) -> None:
        if self._closed:
            raise RuntimeError(f"this {type(self).__name__} is closed: make a new one")

    def _timeout_or(self, timeout: float | None) -> float:
        return self._timeout if timeout is None else _positive("timeout", timeout)

    def _call(self, kind: Kind, wanted: Wanted, timeout: float) -> EncodeCall:
        options = wanted.options(kind, self.model)
        limit = payload_limit(self._connection.max_message_bytes, options)
        return EncodeCall(kind, options, FORMATS[wanted.dtype], timeout, self._batch_size, limit)

    def _job(
        self,
        kind: Kind,
        items: object,
        wanted: Wanted,
        on_error: str,
        timeout: float | None,
        progress: Progress | None,
    ) -> EncodeJob:
        """The job of an encode call; raises TypeError or ValueError for a wrong argument."""
        require_many(kind, items)
        if on_error not in _ON_ERROR:
            raise ValueError(f"on_error is {on_error!r}: pass 'raise' or 'mask'")
        total = len(items) if isinstance(items, Sized) else None
        return EncodeJob(self._call(kind, wanted, self._timeout_or(timeout)), total, progress)

    def _ledger(self, kind: Kind, items: object, wanted: Wanted, window: int, timeout: float | None) -> StreamLedger:
        """The ledger of a stream; raises TypeError or ValueError for a wrong argument."""
        if kind not in _KINDS:
            raise ValueError(f"kind is {kind!r}: pass 'image' or 'text'")
        require_many(kind, items, method="encode_stream")
        _positive("window", window)
        seconds = math.inf if timeout is None else _positive("timeout", timeout)
        return StreamLedger(self._call(kind, wanted, seconds), self._retry)

    def _error(self, failure: Failure, timeout: float) -> ServiceError:
        """The ServiceError for a call that is not, or no longer, tried again."""
        return service_error(
            failure.code,
            failure.details,
            address=self.address,
            timeout=timeout,
            has_token=self._connection.token is not None,
        )

    def _unhealthy(self, failure: Failure, timeout: float) -> bool:
        """False when nobody answered the health check; raises ServiceError when the answer was another error."""
        if failure.code in ("UNAVAILABLE", "DEADLINE_EXCEEDED"):
            return False
        raise self._error(failure, timeout)


def _positive(name: str, value: float) -> float:
    if not value > 0:
        raise ValueError(f"{name} is {value}: pass more than 0")
    return value
