"""What is sent again and what is not, and how a whole call fails."""

import math
import pickle
import queue
import socket
import threading

import grpc
import numpy as np
import pytest

from encoder.client import RetryPolicy, ServiceError
from encoder.client.retry import Failure
from tests.client.formula import expected_rows

Code = grpc.StatusCode


def test_unavailable_twice_then_well(client, service):
    service.fail_next(Code.UNAVAILABLE, times=2)
    result = client.encode_images([b"x", b"y"], on_error="mask")
    np.testing.assert_array_equal(result.vectors, expected_rows([b"x", b"y"]))
    assert result.batches[0].attempts == 3 and len(service.seen) == 3


def test_a_full_queue_is_asked_again_when_it_says(client, service):
    service.fail_next(Code.RESOURCE_EXHAUSTED, "the queue is full", retry_after=0.4)
    client.encode_text(["x"])
    first, second = service.seen
    # The client's own first pause would be 0.01 s at most.
    assert second.at - first.at >= 0.4


def test_a_full_queue_without_a_time_is_asked_again_too(client, service):
    service.fail_next(Code.RESOURCE_EXHAUSTED, "the queue is full", times=2)
    client.encode_images([b"x"])
    assert len(service.seen) == 3


@pytest.mark.parametrize(
    "code", [Code.INVALID_ARGUMENT, Code.NOT_FOUND, Code.FAILED_PRECONDITION, Code.INTERNAL, Code.DEADLINE_EXCEEDED]
)
def test_other_codes_are_not_tried_again(client, service, code):
    service.fail_next(code, "the reason;\n the next step", retry_after=0.01)
    with pytest.raises(ServiceError) as caught:
        client.encode_images([b"x"])
    assert caught.value.code == code.name and len(service.seen) == 1
    assert "\n" not in str(caught.value)
    if code is not Code.DEADLINE_EXCEEDED:
        assert str(caught.value) == f"{code.name}: the reason; the next step"


def test_retries_end(connect, service, running):
    service.fail_next(Code.UNAVAILABLE, "draining", times=9)
    client = connect(retries=RetryPolicy(2, 0.01, 0.01))
    with pytest.raises(ServiceError) as caught:
        client.encode_images([b"x"])
    assert len(service.seen) == 3
    assert str(caught.value) == f"UNAVAILABLE: {running.address} does not answer now (draining): try again later"


def test_no_retries(connect, service):
    service.fail_next(Code.UNAVAILABLE)
    with pytest.raises(ServiceError, match="told to fail"):
        connect(retries=0).list_models()
    assert len(service.seen) == 1


def test_no_pause_past_the_deadline(client, service):
    service.fail_next(Code.RESOURCE_EXHAUSTED, "the queue is full", retry_after=30)
    with pytest.raises(ServiceError, match="RESOURCE_EXHAUSTED: the queue is full"):
        client.encode_images([b"x"], timeout=5)
    assert len(service.seen) == 1


def test_the_deadline_covers_the_retries(connect, service):
    service.fail_next(Code.UNAVAILABLE, retry_after=0.5)
    connect(timeout=8.0).encode_images([b"x"])
    first, second = (call.seconds_left for call in service.seen)
    assert first < 8.1 and second < first - 0.4


def test_no_answer_in_time(connect, service, running):
    release = threading.Event()
    service.before_answer = lambda request, context: release.wait(20)
    with pytest.raises(ServiceError) as caught:
        connect().encode_images([b"x"], timeout=0.3)
    release.set()
    assert str(caught.value) == (
        f"DEADLINE_EXCEEDED: no answer from {running.address} within 0.3 s: "
        "raise timeout=, or send less at once with batch_size="
    )


def test_an_endless_deadline(connect, service):
    connect(timeout=math.inf).encode_images([b"x"])
    left = service.seen[0].seconds_left
    assert left is None or left > 1e6


def test_nobody_there(connect):
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
        client = connect(address, retries=1)
        with pytest.raises(ServiceError) as caught:
            client.encode_images([b"x"])
        assert str(caught.value) == f"UNAVAILABLE: no service at {address}: start one with `vitfleet serve`"
        assert client.healthy() is False


def test_a_name_that_does_not_resolve(connect):
    with pytest.raises(ServiceError, match=r"the name in nowhere\.invalid:1 does not resolve"):
        connect("nowhere.invalid:1", retries=0).list_models()


def test_a_failed_batch_keeps_what_came_before(connect, service):
    def fail_third(request, context):
        if request.images[0].encoded == b"c":
            context.abort(Code.FAILED_PRECONDITION, "cannot do that")

    service.before_answer = fail_third
    client = connect(batch_size=1, concurrency=1)
    with pytest.raises(ServiceError, match="FAILED_PRECONDITION: cannot do that") as caught:
        client.encode_images([b"a", b"b", b"c", b"d"])
    result = caught.value.result
    assert result.ok.tolist()[:3] == [True, True, False]
    np.testing.assert_array_equal(result.vectors[:2], expected_rows([b"a", b"b"]))
    assert result.errors[2].code == "FAILED_PRECONDITION" and result.errors[2].source == "bytes"
    assert all(bool(ok) or index in result.errors for index, ok in enumerate(result.ok))
    again = pickle.loads(pickle.dumps(caught.value))
    assert str(again) == str(caught.value) and again.result.ok.tolist() == result.ok.tolist()


def test_one_failed_batch_ends_the_others(connect, service):
    arrived, ended, told_in_time = threading.Event(), threading.Event(), queue.Queue()

    def answer(request, context):
        if request.images[0].encoded == b"slow":
            context.add_callback(ended.set)
            arrived.set()
            told_in_time.put(ended.wait(8))
        else:
            assert arrived.wait(10)
            context.abort(Code.INTERNAL, "broken")

    service.before_answer = answer
    with pytest.raises(ServiceError, match="broken"):
        connect(batch_size=1).encode_images([b"slow", b"fast"])
    assert told_in_time.get(timeout=10), "the call of the slow batch was cancelled while it was being answered"


def test_too_few_results(client, service):
    service.drop_results = 1
    with pytest.raises(ServiceError, match="INTERNAL: 1 results for 2 items"):
        client.encode_images([b"x", b"y"])


def test_a_message_too_large_for_the_service_is_not_tried_again(connect, tight):
    client = connect(tight.address)
    with pytest.raises(ServiceError) as caught:
        client.encode_images([bytes(5000)])
    assert caught.value.code == "RESOURCE_EXHAUSTED"
    assert str(caught.value).endswith(f"make max_message_bytes= no larger than what {tight.address} takes")
    assert caught.value.result.errors[0].code == "RESOURCE_EXHAUSTED"


class TestRetryPolicy:
    POLICY = RetryPolicy(retries=6, first_delay=0.1, longest_delay=1.0)

    @pytest.mark.parametrize(("attempt", "most"), [(1, 0.1), (2, 0.2), (3, 0.4), (4, 0.8), (5, 1.0), (6, 1.0)])
    def test_pauses_double_to_the_longest_with_jitter(self, attempt, most):
        drawn = [self.POLICY.pause(Failure("UNAVAILABLE", ""), attempt, math.inf) for _ in range(300)]
        assert min(drawn) >= most / 2 and max(drawn) <= most
        assert max(drawn) - min(drawn) > most / 4, "drawn, not fixed"

    def test_the_services_time_is_the_least(self):
        drawn = [self.POLICY.pause(Failure("RESOURCE_EXHAUSTED", "", 2.0), 1, math.inf) for _ in range(100)]
        assert min(drawn) >= 2.0 and max(drawn) <= 2.1

    def test_when_not(self):
        assert self.POLICY.pause(Failure("UNAVAILABLE", ""), 7, math.inf) is None
        assert self.POLICY.pause(Failure("UNAVAILABLE", ""), 1, 0.01) is None
        assert self.POLICY.pause(Failure("INTERNAL", ""), 1, math.inf) is None
        too_large = Failure("RESOURCE_EXHAUSTED", "CLIENT: Sent message larger than max (5000 vs. 4096)")
        assert self.POLICY.pause(too_large, 1, math.inf) is None
        assert RetryPolicy(10**6).pause(Failure("UNAVAILABLE", ""), 10**5, math.inf) <= 5.0

    @pytest.mark.parametrize("settings", [{"retries": -1}, {"first_delay": 0}, {"first_delay": 2, "longest_delay": 1}])
    def test_settings_that_cannot_be(self, settings):
        with pytest.raises(ValueError, match=next(iter(settings))):
            RetryPolicy(**settings)
