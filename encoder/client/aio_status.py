"""How a grpc.aio stream really ended.

When the service ends a stream while a message is being written, grpc.aio puts INTERNAL in place of the service's status
if the write's failure is noticed last, and the service's status in place of INTERNAL if it is noticed first. The first
status of a call is therefore kept, and told apart from the one that is raised.
"""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import grpc
import grpc.aio

from encoder.client.retry import Failure

# grpc.aio's own words for a write that failed.
_WRITE_FAILED = ("INTERNAL", "Internal error from Core")


class CallEnding:
    """Watches a call from its beginning."""

    def __init__(self, call: grpc.aio.StreamStreamCall) -> None:
        self._first: Failure | None = None
        call.add_done_callback(self._keep_first)

    def _keep_first(self, call: Any) -> None:
        if self._first is None:
            trailers = _at_once(call.trailing_metadata())
            self._first = Failure.of_parts(_at_once(call.code()), _at_once(call.details()), trailers)

    def failure(self, raised: grpc.RpcError) -> Failure:
        """The service's own status, given what reading the call raised."""
        for failure in (Failure.of_call(raised), self._first):
            if failure is not None and (failure.code, failure.details) != _WRITE_FAILED:
                return Failure.early_end() if failure.code == "OK" else failure
        return Failure("UNAVAILABLE", "the stream broke while an item was being sent")


def _at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """What a coroutine returns that has nothing to wait for: the status of a call that is done."""
    try:
        coroutine.send(None)
    except StopIteration as stop:
        return stop.value
    coroutine.close()
    raise RuntimeError("the status of a call that is done was not there")
