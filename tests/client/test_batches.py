"""Large inputs: batches by count and by bytes, several in flight, in order, and no more in memory than needed."""

import logging
import threading

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.client.errors import ItemError
from encoder.client.formats import FORMATS
from encoder.client.job import EncodeJob
from encoder.client.request import ITEM_OVERHEAD, EncodeCall
from encoder.v1 import encoder_pb2 as pb
from tests.client.formula import expected, expected_rows

CAP = 2**16


def numbered(count: int) -> list[bytes]:
    return [f"item {number}".encode() for number in range(count)]


def test_by_count(connect, service):
    payloads = numbered(10)
    result = connect(batch_size=4).encode_images(payloads, on_error="mask")
    np.testing.assert_array_equal(result.vectors, expected_rows(payloads))
    assert sorted(len(call.request.images) for call in service.seen) == [2, 4, 4]
    assert [batch.indices.tolist() for batch in result.batches] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]


def test_by_bytes(connect, service):
    payloads = [bytes([number]) * 20_000 for number in range(7)] + [bytes(60_000)]
    np.testing.assert_array_equal(connect(max_message_bytes=CAP).encode_images(payloads), expected_rows(payloads))
    assert sorted(len(call.request.images) for call in service.seen) == [1, 1, 3, 3]
    assert max(call.request.ByteSize() for call in service.seen) <= CAP


def test_a_message_just_within_the_limit_passes(connect, service):
    # Two items that leave less than a kilobyte of the payload limit.
    payloads = [bytes(30_600), bytes([1]) * 30_600]
    np.testing.assert_array_equal(connect(max_message_bytes=CAP).encode_images(payloads), expected_rows(payloads))
    assert len(service.seen) == 1


def test_the_framing_of_many_small_items_counts_too(connect, service):
    payloads = [f"{number:020}".encode() for number in range(3000)]
    client = connect(max_message_bytes=CAP, batch_size=10_000)
    np.testing.assert_array_equal(client.encode_images(payloads), expected_rows(payloads))
    assert max(call.request.ByteSize() for call in service.seen) <= CAP


def test_order_holds_when_answers_overtake(connect, service):
    second_done = threading.Event()

    def first_waits_for_second(request, context):
        if request.images[0].encoded == b"item 0":
            assert second_done.wait(10)
        elif request.images[0].encoded == b"item 2":
            second_done.set()

    service.before_answer = first_waits_for_second
    payloads = numbered(8)
    np.testing.assert_array_equal(connect(batch_size=2).encode_images(payloads), expected_rows(payloads))


def test_as_many_in_flight_as_allowed_and_no_more(connect, service):
    together = threading.Barrier(3)
    service.before_answer = lambda request, context: together.wait(10)
    payloads = numbered(18)
    vectors = connect(batch_size=2, concurrency=3).encode_images(payloads)
    np.testing.assert_array_equal(vectors, expected_rows(payloads))
    assert service.most_in_flight == 3


def test_a_generator_is_read_as_needed(connect, service):
    ahead: list[int] = []

    def items():
        for number, payload in enumerate(numbered(60)):
            ahead.append(number - service.items_answered)
            yield payload

    vectors = connect(batch_size=5, concurrency=2).encode_images(items())
    np.testing.assert_array_equal(vectors, expected_rows(numbered(60)))
    # Two batches in flight, and one that is being gathered.
    assert max(ahead) <= 15


def test_files_are_read_when_their_batch_is_sent(connect, tmp_path):
    paths = [tmp_path / f"{number}.jpg" for number in range(4)]

    def items():
        for path in paths:
            path.write_bytes(path.name.encode())
        yield paths[0]
        paths[0].unlink()
        yield paths[1]
        paths[1].write_bytes(b"longer than before")
        yield paths[2]
        paths[2].write_bytes(b"-")
        yield paths[3]

    result = connect(batch_size=8).encode_images(items(), on_error="mask")
    assert {index: error.message for index, error in result.errors.items()} == {
        0: "cannot read: No such file or directory",
        1: "the file changed its size while it was waiting to be sent",
        2: "the file changed its size while it was waiting to be sent",
    }
    np.testing.assert_array_equal(result.vectors[3], expected(b"3.jpg"))


def test_progress(connect):
    client, told = connect(batch_size=4, concurrency=1), []
    client.encode_images([None, *numbered(9)], on_error="mask", progress=lambda *news: told.append(news))
    assert told == [(5, 10), (9, 10), (10, 10)]
    told.clear()
    client.encode_images((item for item in [b"x", None]), on_error="mask", progress=lambda *news: told.append(news))
    assert told == [(2, None)]
    told.clear()
    client.encode_images([None], on_error="mask", progress=lambda *news: told.append(news))
    assert told == [(1, 1)]


def test_an_error_of_the_generator_comes_through(connect):
    def items():
        yield from numbered(3)
        raise LookupError("no more pictures")

    with pytest.raises(LookupError, match="no more pictures"):
        connect(batch_size=2).encode_images(items())


def test_several_fingerprints_are_said(connect, service, caplog):
    service.provenance = lambda number: pb.Provenance(fingerprint=f"f{number}")
    with caplog.at_level(logging.WARNING, logger="encoder.client"):
        result = connect(batch_size=1, concurrency=1).encode_images([b"x", b"y"], on_error="mask")
    assert result.fingerprints == ("f1", "f2")
    assert [record.getMessage() for record in caplog.records] == [
        "one call was answered under several fingerprints: f1, f2; its vectors may not belong together, "
        "name a pool= to keep to one"
    ]


@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(0, 900), max_size=60),
    max_items=st.integers(1, 9),
    max_bytes=st.integers(ITEM_OVERHEAD + 1, 3000),
)
def test_batches_hold_every_item_once_in_order_within_the_limits(sizes, max_items, max_bytes):
    call = EncodeCall("image", pb.EncodeOptions(), FORMATS["float32"], 1.0, max_items, max_bytes)
    job, batches, refused = EncodeJob(call), [], []
    for size in sizes:
        source = call.source(job.take(), bytes(size))
        if isinstance(source, ItemError):
            refused.append(source.index)
        batches.append(job.place(source))
    batches = [batch.sources for batch in [*batches, job.flush()] if batch]
    fitting = [index for index, size in enumerate(sizes) if size <= max_bytes - ITEM_OVERHEAD]
    assert [source.index for batch in batches for source in batch] == fitting
    assert refused == [index for index in range(len(sizes)) if index not in fitting]
    for place, batch in enumerate(batches):
        following = batches[place + 1] if place + 1 < len(batches) else None
        weight = sum(source.size + ITEM_OVERHEAD for source in batch)
        assert len(batch) <= max_items and weight <= max_bytes
        if following:
            full = len(batch) == max_items or weight + following[0].size + ITEM_OVERHEAD > max_bytes
            assert full, "a batch is closed only when the next item does not fit"
