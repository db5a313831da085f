"""The reading of tags and lengths, held against protobuf's own parser."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as some

from deployments.router.envelope import (
    Envelope,
    MalformedRequest,
    first_outcome,
    read_request,
    read_stream_item,
)
from encoder.v1 import encoder_pb2 as pb

names = some.text(max_size=40)
contents = some.binary(max_size=300)
option_sets = some.builds(
    pb.EncodeOptions,
    model=names,
    pool=names,
    dimensions=some.integers(0, 2**32 - 1),
    normalize=some.booleans(),
    dtype=some.integers(0, 4),
)


@given(some.lists(some.text(max_size=200), max_size=20), option_sets)
@settings(max_examples=100, deadline=None)
def test_a_text_request_is_read_as_protobuf_reads_it(items: list[str], options: pb.EncodeOptions) -> None:
    request = pb.EncodeTextRequest(options=options, texts=items)
    assert read_request(request.SerializeToString()) == Envelope(options.model, options.pool, len(items))


@given(some.lists(contents, max_size=10), some.lists(option_sets, max_size=3))
@settings(max_examples=100, deadline=None)
def test_repeated_options_are_merged_as_protobuf_merges_them(items: list[bytes], parts: list[pb.EncodeOptions]) -> None:
    payload = b"".join(
        [
            *(pb.EncodeImagesRequest(options=part).SerializeToString() for part in parts),
            pb.EncodeImagesRequest(images=[pb.Image(encoded=item) for item in items]).SerializeToString(),
        ]
    )
    parsed = pb.EncodeImagesRequest.FromString(payload)
    assert read_request(payload) == Envelope(parsed.options.model, parsed.options.pool, len(items))


def test_unknown_fields_of_all_wire_types_are_skipped() -> None:
    unknown = b"".join(
        [
            b"\x78\xac\x02",  # field 15, varint 300
            b"\x7d\x01\x02\x03\x04",  # field 15, 4 bytes
            b"\x79\x01\x02\x03\x04\x05\x06\x07\x08",  # field 15, 8 bytes
            b"\x82\x01\x03abc",  # field 16, length-delimited
            b"\x10\x05",  # field 2 as a varint: not an item
        ]
    )
    request = unknown + pb.EncodeTextRequest(texts=["a"], options=pb.EncodeOptions(pool="p")).SerializeToString()
    assert read_request(request + unknown) == Envelope("", "p", 1)


@pytest.mark.parametrize(
    "payload",
    [
        b"\x12",  # no length
        b"\x12\x05abc",  # shorter than it says
        b"\x12\xff\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",  # endless length
        b"\x13\x14",  # a group
        b"\x00\x01",  # field number 0
        b"\x7d\x01",  # half a fixed32
        b"\xff",  # half a tag
        b"\x0a\x02\x0a\x05",  # options that end too early
    ],
)
def test_what_is_no_message_is_refused(payload: bytes) -> None:
    with pytest.raises(MalformedRequest):
        read_request(payload)
    with pytest.raises(MalformedRequest):
        read_stream_item(payload.replace(b"\x0a", b"\x12", 1) if payload[:1] == b"\x0a" else payload)


@given(some.binary(max_size=60))
@settings(max_examples=300, deadline=None)
def test_any_bytes_are_read_or_refused(payload: bytes) -> None:
    for read in (read_request, read_stream_item):
        with suppress(MalformedRequest):
            read(payload)
    first_outcome(payload)


@given(names, some.none() | option_sets, contents)
@settings(max_examples=100, deadline=None)
def test_a_streams_image_becomes_a_request_of_its_own(
    item_id: str, options: pb.EncodeOptions | None, content: bytes
) -> None:
    message = pb.EncodeStreamRequest(id=item_id, image=pb.Image(encoded=content), options=options)
    item = read_stream_item(message.SerializeToString())
    assert (item.id, item.tower) == (item_id, "vision")
    assert item.request is not None
    expected = pb.EncodeImagesRequest(images=[message.image], options=options)
    assert pb.EncodeImagesRequest.FromString(item.request) == expected
    assert item.envelope == Envelope(message.options.model, message.options.pool, 1)


@given(names, some.none() | option_sets, some.text(max_size=300))
@settings(max_examples=100, deadline=None)
def test_a_streams_text_becomes_a_request_of_its_own(item_id: str, options: pb.EncodeOptions | None, text: str) -> None:
    message = pb.EncodeStreamRequest(id=item_id, text=text, options=options)
    item = read_stream_item(message.SerializeToString())
    assert (item.id, item.tower) == (item_id, "text")
    assert item.request is not None
    expected = pb.EncodeTextRequest(texts=[text], options=options)
    assert pb.EncodeTextRequest.FromString(item.request) == expected


def test_of_two_items_the_last_one_counts_as_in_protobuf() -> None:
    text = pb.EncodeStreamRequest(text="a").SerializeToString()
    image = pb.EncodeStreamRequest(image=pb.Image(encoded=b"x")).SerializeToString()
    pixels = pb.EncodeStreamRequest(image=pb.Image(pixels=pb.RawPixels(height=1))).SerializeToString()
    width = pb.EncodeStreamRequest(image=pb.Image(pixels=pb.RawPixels(width=2))).SerializeToString()
    for payload in (text + image, image + text, image + pixels, text + pixels + width, pixels + image + text + text):
        parsed = pb.EncodeStreamRequest.FromString(payload)
        item = read_stream_item(payload)
        assert item.request is not None
        if parsed.WhichOneof("item") == "text":
            assert item.tower == "text"
            assert list(pb.EncodeTextRequest.FromString(item.request).texts) == [parsed.text]
        else:
            assert item.tower == "vision"
            assert list(pb.EncodeImagesRequest.FromString(item.request).images) == [parsed.image]


def test_a_message_without_an_item_has_no_request() -> None:
    item = read_stream_item(pb.EncodeStreamRequest(id="a").SerializeToString())
    assert (item.id, item.tower, item.request) == ("a", None, None)


def test_an_id_that_is_not_utf8_is_refused() -> None:
    with pytest.raises(MalformedRequest, match="UTF-8"):
        read_stream_item(b"\x0a\x02\xff\xfe\x22\x01a")


def test_the_first_outcome_of_a_response() -> None:
    embedding = pb.ImageResult(embedding=pb.Embedding(values=b"1234", dimensions=1))
    error = pb.ImageResult()
    error.error.code = 3
    provenance = pb.Provenance(model="clip")
    cases = [
        ([embedding, error], "embedding"),
        ([error, embedding], "error"),
        ([pb.ImageResult(features=pb.Features(tokens=1)), error], "features"),
        ([pb.ImageResult()], "none"),
        ([], "none"),
    ]
    for results, expected in cases:
        response = pb.EncodeImagesResponse(results=results, provenance=provenance)
        assert first_outcome(response.SerializeToString()) == expected
    text = pb.EncodeTextResponse(results=[pb.TextResult(token_count=3, embedding=embedding.embedding)])
    assert first_outcome(text.SerializeToString()) == "embedding"
