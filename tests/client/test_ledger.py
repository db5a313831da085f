"""What a stream sends again, and when, without any transport."""

import math

import grpc
import pytest

from encoder.client import RetryPolicy
from encoder.client.formats import FORMATS
from encoder.client.ledger import Outgoing, StreamLedger
from encoder.client.request import EncodeCall
from encoder.client.retry import Failure
from encoder.v1 import encoder_pb2 as pb
from tests.client.service import retry_status

POLICY = RetryPolicy(retries=2, first_delay=0.1, longest_delay=0.1)


@pytest.fixture
def ledger() -> StreamLedger:
    """Items 0, 1 and 2 are under way."""
    call = EncodeCall("image", pb.EncodeOptions(), FORMATS["float32"], math.inf, 32, 2**20)
    ledger = StreamLedger(call, POLICY)
    for index in range(3):
        prepared = ledger.prepare(index, (f"id {index}", bytes([index])))
        assert isinstance(prepared, Outgoing) and prepared.id == f"id {index}"
        ledger.admit(prepared)
    return ledger


def full(index: int, delay: float | None = None) -> pb.EncodeStreamResponse:
    status = retry_status(grpc.StatusCode.RESOURCE_EXHAUSTED, "the queue is full", delay)
    return pb.EncodeStreamResponse(id=str(index), error=status)


def ids(requests: list[pb.EncodeStreamRequest]) -> list[str]:
    return [request.id for request in requests]


def test_an_item_is_due_once_after_its_pause(ledger):
    assert ledger.settle(full(1, delay=3.0), now=100.0, remaining=math.inf) is None
    assert len(ledger) == 3
    assert ledger.due(102.9) == []
    assert 3.0 <= ledger.seconds_to_due(100.0) <= 3.1
    assert ids(ledger.due(103.1)) == ["1"]
    assert ledger.due(200.0) == [] and ledger.seconds_to_due(200.0) == math.inf


def test_a_new_call_takes_what_is_not_waiting_for_its_pause(ledger):
    ledger.settle(full(1, delay=3.0), now=100.0, remaining=math.inf)
    assert ids(ledger.unanswered()) == ["0", "2"]
    ledger.due(104.0)
    assert ids(ledger.unanswered()) == ["0", "1", "2"]


def test_a_queue_that_stays_full_becomes_the_items_error(ledger):
    for _ in range(POLICY.retries):
        assert ledger.settle(full(1), now=0.0, remaining=math.inf) is None
        assert ids(ledger.due(1.0)) == ["1"]
    result = ledger.settle(full(1), now=0.0, remaining=math.inf)
    assert (result.id, result.index, result.error.code) == ("id 1", 1, "RESOURCE_EXHAUSTED")
    assert len(ledger) == 2


def test_no_pause_past_the_deadline(ledger):
    assert ledger.settle(full(1, delay=3.0), now=0.0, remaining=2.0).error.code == "RESOURCE_EXHAUSTED"


def test_broken_calls_in_a_row_are_counted_and_an_answer_resets_the_count(ledger):
    broken = Failure("UNAVAILABLE", "draining")
    assert ledger.pause_after(broken, math.inf) is not None
    assert ledger.pause_after(broken, math.inf) is not None
    ledger.settle(full(0), now=0.0, remaining=math.inf)
    assert ledger.pause_after(broken, math.inf) is not None
    assert ledger.pause_after(broken, math.inf) is not None
    assert ledger.pause_after(broken, math.inf) is None
