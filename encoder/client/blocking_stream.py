"""The blocking stream: one thread reads the caller's items, one the answers; the caller's own thread yields."""

from __future__ import annotations

import math
import queue
import threading
import time
from collections.abc import Callable, Generator, Iterable

import grpc

from encoder.client.errors import ServiceError
from encoder.client.ledger import GOODBYE_SECONDS, CallEnded, SourceEnded, StreamEvent, StreamLedger
from encoder.client.results import StreamResult
from encoder.client.retry import Deadline, Failure
from encoder.v1 import encoder_pb2 as pb

# None ends the requests of one call.
_Outbox = queue.SimpleQueue[pb.EncodeStreamRequest | None]


class BlockingStream:
    """One run of encode_stream."""

    def __init__(
        self,
        method: grpc.StreamStreamMultiCallable,
        metadata: tuple[tuple[str, str], ...],
        ledger: StreamLedger,
        window: int,
        explain: Callable[[Failure, float], ServiceError],
    ) -> None:
        self._method = method
        self._metadata = metadata
        self._ledger = ledger
        self._explain = explain
        self._window = threading.Semaphore(window)
        self._deadline = Deadline(ledger.call.timeout)
        self._events: queue.SimpleQueue[StreamEvent] = queue.SimpleQueue()
        # Guards the ledger, and which outbox is the one in use.
        self._lock = threading.Lock()
        self._outbox: _Outbox = queue.SimpleQueue()
        self._call: grpc.Call | None = None
        self._stopped = False
        self._source_ended = False

    def results(self, items: Iterable[object]) -> Generator[StreamResult, None, None]:
        threading.Thread(target=self._read_items, args=(items,), name="encoder-stream-items", daemon=True).start()
        try:
            self._open_call()
            while not self._finished():
                self._send_due()
                result = self._handle(self._next_event())
                if result is not None:
                    self._window.release()
                    yield result
            self._say_goodbye()
        finally:
            self._stop()

    def _finished(self) -> bool:
        with self._lock:
            return self._source_ended and not len(self._ledger)

    def _read_items(self, items: Iterable[object]) -> None:
        """In a thread: sends the caller's items as the window allows."""
        try:
            for index, item in enumerate(items):
                self._window.acquire()
                if self._stopped:
                    return
                prepared = self._ledger.prepare(index, item)
                if isinstance(prepared, StreamResult):
                    self._events.put(prepared)
                    continue
                with self._lock:
                    self._ledger.admit(prepared)
                    self._outbox.put(prepared.request)
        except BaseException as error:  # the caller's own; raised again in the caller's thread
            self._events.put(SourceEnded(error))
        else:
            self._events.put(SourceEnded())

    def _open_call(self) -> None:
        with self._lock:
            outbox: _Outbox = queue.SimpleQueue()
            for request in self._ledger.unanswered():
                outbox.put(request)
            self._outbox = outbox
        call = self._method(iter(outbox.get, None), timeout=self._deadline.for_grpc(), metadata=self._metadata)
        self._call = call
        threading.Thread(target=self._read_answers, args=(call,), name="encoder-stream-answers", daemon=True).start()

    def _read_answers(self, call: Iterable[pb.EncodeStreamResponse]) -> None:
        """In a thread: one call's answers, and how it ended."""
        try:
            for response in call:
                self._events.put(response)
        except grpc.RpcError as error:
            self._events.put(CallEnded(Failure.of_call(error)))
        else:
            self._events.put(CallEnded(Failure.early_end()))

    def _send_due(self) -> None:
        with self._lock:
            for request in self._ledger.due(time.monotonic()):
                self._outbox.put(request)

    def _next_event(self) -> StreamEvent | None:
        with self._lock:
            seconds = self._ledger.seconds_to_due(time.monotonic())
        try:
            return self._events.get(timeout=None if math.isinf(seconds) else seconds)
        except queue.Empty:
            return None

    def _handle(self, event: StreamEvent | None) -> StreamResult | None:
        match event:
            case StreamResult():
                return event
            case pb.EncodeStreamResponse():
                with self._lock:
                    return self._ledger.settle(event, time.monotonic(), self._deadline.remaining())
            case SourceEnded(error):
                self._source_ended = True
                if error is not None:
                    raise error
            case CallEnded(failure):
                self._reopen(failure)
        return None

    def _reopen(self, failure: Failure) -> None:
        pause = self._ledger.pause_after(failure, self._deadline.remaining())
        if pause is None:
            raise self._explain(failure, self._ledger.call.timeout)
        # Ends the thread in which grpc takes requests of the broken call.
        self._outbox.put(None)
        time.sleep(pause)
        self._open_call()

    def _say_goodbye(self) -> None:
        """Lets the service end its side, so that it does not see a cancelled call."""
        self._outbox.put(None)
        try:
            self._events.get(timeout=GOODBYE_SECONDS)
        except queue.Empty:
            return

    def _stop(self) -> None:
        self._stopped = True
        self._window.release()
        self._outbox.put(None)
        if self._call is not None:
            self._call.cancel()
