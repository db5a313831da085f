"""encode_stream: results as they come, ids, the window, broken calls, full queues, early ends."""

import gc
import threading
import time

import grpc
import numpy as np
import pytest

from encoder.client import RetryPolicy, ServiceError
from tests.client.formula import expected, int8_of

Code = grpc.StatusCode


def numbered(count: int) -> list[bytes]:
    return [f"item {number}".encode() for number in range(count)]


def check(results: list, payloads: list) -> None:
    """Every item answered once, with its own vector."""
    assert sorted(result.index for result in results) == list(range(len(payloads)))
    for result in results:
        assert result.ok, result.error
        np.testing.assert_array_equal(result.vector, expected(payloads[result.index]))


def test_results_as_they_come(client, service):
    service.alone_after = 30
    payloads = numbered(8)
    results = list(client.encode_stream(payloads))
    check(results, payloads)
    # The service answers pairs in reverse.
    assert [result.index for result in results] == [1, 0, 3, 2, 5, 4, 7, 6]
    assert [result.id for result in results] == [str(result.index) for result in results]
    assert results[0].provenance.fingerprint == "f1" and results[0].timings is not None
    vector = results[0].vector
    vector *= 2  # the caller's own, not a view on something read-only


def test_ids_of_the_caller_may_be_equal(client):
    results = list(client.encode_stream([("a", b"x"), ("b", b"y"), ("a", b"z"), b"w"]))
    assert {result.index: result.id for result in results} == {0: "a", 1: "b", 2: "a", 3: "3"}
    check(results, [b"x", b"y", b"z", b"w"])


def test_texts_and_options(client):
    results = list(client.encode_stream(["a cat", "x " * 6], kind="text", dtype="int8", dimensions=4))
    for result in results:
        values, scale = int8_of(expected(["a cat", "x " * 6][result.index], 4))
        np.testing.assert_array_equal(result.vector, values)
        assert (result.scale, result.dimensions) == (scale, 4)
    assert {result.index: (result.token_count, result.truncated) for result in results} == {0: (4, False), 1: (8, True)}


def test_files_and_failed_items(client, tmp_path):
    path = tmp_path / "a.jpg"
    path.write_bytes(b"file")
    items = [path, tmp_path / "missing.jpg", ("mine", b"BAD"), b"MUTE", 7]
    results = {result.index: result for result in client.encode_stream(items)}
    np.testing.assert_array_equal(results[0].vector, expected(b"file"))
    assert results[1].error.message == "cannot read: No such file or directory"
    assert results[1].provenance is None and results[1].vector is None
    assert (results[2].id, results[2].error.code) == ("mine", "INVALID_ARGUMENT")
    assert results[3].error.code == "INTERNAL"
    assert results[4].error.source == "int" and not results[4].ok


def test_more_failed_items_than_the_window(client):
    assert [result.index for result in client.encode_stream([None] * 20, window=2)] == list(range(20))


def test_nothing_to_stream(client):
    assert list(client.encode_stream([])) == []


def test_the_window_bounds_what_is_read_ahead(client):
    read = 0

    def items():
        nonlocal read
        for payload in numbered(40):
            read += 1
            yield payload

    ahead, results = [], []
    for result in client.encode_stream(items(), window=4):
        results.append(result)
        ahead.append(read - len(results))
    check(results, numbered(40))
    # The window, and the item that waits for room in it.
    assert max(ahead) <= 5


def test_a_slow_source_does_not_hold_results_back(client):
    first_seen = threading.Event()

    def items():
        yield b"x"
        # Only the result of the first item lets the second come.
        assert first_seen.wait(10)
        yield b"y"

    stream = client.encode_stream(items())
    # This generator would block the loop of the asyncio client, which has its own test in test_asyncio.
    if not hasattr(client, "wrapped"):
        assert next(stream).index == 0
    first_seen.set()
    assert [result.index for result in stream][-1:] in ([1], [0])


def test_a_broken_stream_goes_on(client, service):
    service.stream_limits.extend([3, 0, 5])
    payloads = numbered(20)
    results = list(client.encode_stream(payloads, window=6))
    check(results, payloads)
    assert [call.method for call in service.seen] == ["EncodeStream"] * 4


def test_a_stream_that_the_service_ends_well_goes_on(client, service):
    service.stream_limits.append(2)
    service.stream_end = lambda context: None
    check(list(client.encode_stream(numbered(7))), numbered(7))
    assert len(service.seen) == 2


def test_a_stream_breaks_for_good_after_the_retries(connect, service):
    service.stream_limits.extend([0] * 20)
    with pytest.raises(ServiceError, match=r"UNAVAILABLE: .* does not answer now \(draining\)"):
        list(connect(retries=RetryPolicy(3, 0.01, 0.01)).encode_stream(numbered(3)))
    assert len(service.seen) == 4


def test_progress_resets_the_retries(connect, service):
    service.stream_limits.extend([1] * 6)
    check(list(connect(retries=RetryPolicy(1, 0.01, 0.01)).encode_stream(numbered(7), window=7)), numbered(7))


def test_other_failures_end_the_stream(client, service):
    service.fail_next(Code.UNAUTHENTICATED, "")
    with pytest.raises(ServiceError, match="UNAUTHENTICATED: no token was sent: pass token= to the client"):
        list(client.encode_stream([b"x"]))
    assert len(service.seen) == 1


def test_an_item_that_met_a_full_queue_is_sent_again(client, service):
    payloads = [b"FULL a", b"x", b"FULL b", b"y"]
    started = time.monotonic()
    check(list(client.encode_stream(payloads)), payloads)
    assert time.monotonic() - started >= service.full_queue_delay
    assert sorted(service.stream_received) == ["0", "0", "1", "2", "2", "3"]


def test_a_full_queue_without_retries_is_the_items_error(connect):
    results = list(connect(retries=0).encode_stream([b"FULL"]))
    assert results[0].error.code == "RESOURCE_EXHAUSTED" and results[0].error.message == "the queue is full"


def test_an_answer_to_nothing(client):
    with pytest.raises(ServiceError, match="INTERNAL: an answer to id '999', which is not open"):
        list(client.encode_stream([b"STRAY"]))


def test_an_error_of_the_source_comes_through(client):
    def items():
        yield from numbered(2)
        raise LookupError("no more pictures")

    with pytest.raises(LookupError, match="no more pictures"):
        list(client.encode_stream(items()))


def test_a_deadline_for_the_whole_stream(client, service):
    service.stream_limits.append(None)
    blocked = threading.Event()
    service._stream_answer = lambda request: blocked.wait(10)
    with pytest.raises(ServiceError, match=r"DEADLINE_EXCEEDED: no answer from .* within 0.3 s"):
        list(client.encode_stream([b"x"], timeout=0.3))
    blocked.set()


def test_closing_early_ends_the_call_and_the_threads(client, service):
    cancelled = threading.Event()
    enter, answer = service._enter, service._stream_answer

    def watched(method, request, context):
        context.add_callback(cancelled.set)
        return enter(method, request, context)

    def only_the_first(request):
        assert request.id == "0" or cancelled.wait(20)
        return answer(request)

    service._enter, service._stream_answer = watched, only_the_first
    stream = client.encode_stream(iter(numbered(1000)), window=4)
    next(stream)
    assert not cancelled.is_set()
    stream.close()
    del stream
    gc.collect()
    assert cancelled.wait(5)
    for thread in threading.enumerate():
        if thread.name.startswith("encoder-stream"):
            thread.join(5)
            assert not thread.is_alive(), thread


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (lambda client: client.encode_stream(b"x"), r"encode_stream\(\[item\]\)"),
        (lambda client: client.encode_stream([b"x"], kind="sound"), "kind is 'sound'"),
        (lambda client: client.encode_stream([b"x"], window=0), "window is 0"),
        (lambda client: client.encode_stream([b"x"], timeout=-1), "timeout is -1"),
        (lambda client: client.encode_stream([b"x"], dtype="int4"), "dtype is 'int4'"),
    ],
)
def test_wrong_arguments_are_said_at_once(client, call, error):
    with pytest.raises((TypeError, ValueError), match=error):
        call(client)
