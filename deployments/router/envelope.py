"""Reads of a message what the router needs, such as options and how many items there are, and leaves the rest alone.

A request of 64 MiB is skipped over, not copied: only tags and lengths of the outermost message are read
(https://protobuf.dev/programming-guides/encoding). What lies deeper is the pool's to judge.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from google.protobuf.message import DecodeError

from encoder.settings import TowerName
from encoder.v1 import encoder_pb2 as pb

_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5

# Field numbers of encoder.v1: EncodeImagesRequest and EncodeTextRequest number theirs alike.
_REQUEST_OPTIONS, _REQUEST_ITEMS = 1, 2
_STREAM_ID, _STREAM_OPTIONS, _STREAM_IMAGE, _STREAM_TEXT = 1, 2, 3, 4
_RESPONSE_RESULTS, _RESPONSE_PROVENANCE = 1, 2
_RESULT_EMBEDDING, _RESULT_ERROR, _RESULT_FEATURES = 1, 2, 3

_OPTIONS_TAG = bytes([_REQUEST_OPTIONS << 3 | _BYTES])
_ITEM_TAG = bytes([_REQUEST_ITEMS << 3 | _BYTES])


class MalformedRequest(ValueError):
    """Bytes that are no message of the kind they should be."""


@dataclass(frozen=True, slots=True)
class Envelope:
    """What routing needs of a request: `model` and `pool` may be empty."""

    model: str
    pool: str
    items: int


@dataclass(frozen=True, slots=True)
class StreamItem:
    """One message of a stream; `request` is the item alone, as a unary request, and None when there is no item."""

    id: str
    envelope: Envelope
    tower: TowerName | None
    request: bytes | None


def read_request(payload: bytes) -> Envelope:
    """The envelope of an EncodeImagesRequest or EncodeTextRequest; raises MalformedRequest."""
    options: list[bytes] = []
    items = 0
    for number, wire_type, start, end in _fields(payload):
        if wire_type != _BYTES:
            continue
        if number == _REQUEST_ITEMS:
            items += 1
        elif number == _REQUEST_OPTIONS:
            options.append(payload[start:end])
    return _envelope(b"".join(options), items)


def read_stream_item(payload: bytes) -> StreamItem:
    """Takes an EncodeStreamRequest apart and puts its item into a request of its own; raises MalformedRequest."""
    item_id = b""
    options: list[bytes] = []
    tower: TowerName | None = None
    content: list[bytes] = []
    for number, wire_type, start, end in _fields(payload):
        if wire_type != _BYTES:
            continue
        if number == _STREAM_ID:
            item_id = payload[start:end]
        elif number == _STREAM_OPTIONS:
            options.append(payload[start:end])
        elif number == _STREAM_IMAGE:
            # The last member of a oneof wins; the same message twice is merged, which joining its bytes does.
            content = [*content, payload[start:end]] if tower == "vision" else [payload[start:end]]
            tower = "vision"
        elif number == _STREAM_TEXT:
            content, tower = [payload[start:end]], "text"
    joined = b"".join(options)
    try:
        name = item_id.decode("utf-8")
    except UnicodeDecodeError:
        raise MalformedRequest("the id is not UTF-8") from None
    request = None if tower is None else _unary_request(joined, b"".join(content))
    return StreamItem(name, _envelope(joined, 1), tower, request)


def first_outcome(response: bytes) -> Literal["embedding", "features", "error", "none"]:
    """What an EncodeImagesResponse or EncodeTextResponse begins with, found without parsing its vectors."""
    try:
        for number, wire_type, start, end in _fields(response):
            if number != _RESPONSE_RESULTS or wire_type != _BYTES:
                continue
            for inner, _, _, _ in _fields(response[start:end]):
                if inner == _RESULT_EMBEDDING:
                    return "embedding"
                if inner == _RESULT_FEATURES:
                    return "features"
                if inner == _RESULT_ERROR:
                    return "error"
            return "none"
    except MalformedRequest:
        pass
    return "none"


def read_provenance(response: bytes) -> pb.Provenance:
    """Where an EncodeImagesResponse or EncodeTextResponse comes from; empty where it does not say."""
    found: list[bytes] = []
    try:
        for number, wire_type, start, end in _fields(response):
            if number == _RESPONSE_PROVENANCE and wire_type == _BYTES:
                found.append(response[start:end])
        return pb.Provenance.FromString(b"".join(found))
    except (MalformedRequest, DecodeError):
        return pb.Provenance()


def strings_of(message: bytes, field_number: int) -> list[str]:
    """The values of a repeated string field of any message; raises MalformedRequest."""
    try:
        return [
            message[start:end].decode("utf-8")
            for number, wire_type, start, end in _fields(message)
            if number == field_number and wire_type == _BYTES
        ]
    except UnicodeDecodeError:
        raise MalformedRequest(f"field {field_number} is not UTF-8") from None


def _envelope(options: bytes, items: int) -> Envelope:
    if not options:
        return Envelope("", "", items)
    try:
        parsed = pb.EncodeOptions.FromString(options)
    except DecodeError:
        raise MalformedRequest("its options cannot be parsed") from None
    return Envelope(parsed.model, parsed.pool, items)


def _unary_request(options: bytes, content: bytes) -> bytes:
    head = [_OPTIONS_TAG, _varint(len(options)), options] if options else []
    return b"".join([*head, _ITEM_TAG, _varint(len(content)), content])


def _fields(data: bytes) -> Iterator[tuple[int, int, int, int]]:
    """Field number, wire type, and start and end of each field's content."""
    position, size = 0, len(data)
    while position < size:
        tag, position = _read_varint(data, position)
        number, wire_type = tag >> 3, tag & 7
        if wire_type == _BYTES:
            length, position = _read_varint(data, position)
        elif wire_type == _VARINT:
            _, after = _read_varint(data, position)
            length = after - position
        elif wire_type == _FIXED32:
            length = 4
        elif wire_type == _FIXED64:
            length = 8
        else:
            raise MalformedRequest(f"wire type {wire_type} is not used by this contract")
        end = position + length
        if number == 0 or end > size:
            raise MalformedRequest("its bytes end before its fields do, or are no protobuf message")
        yield number, wire_type, position, end
        position = end


def _read_varint(data: bytes, position: int) -> tuple[int, int]:
    value = shift = 0
    while position < len(data) and shift < 70:
        byte = data[position]
        position += 1
        value |= (byte & 0x7F) << shift
        if byte < 0x80:
            return value, position
        shift += 7
    raise MalformedRequest("its bytes end before its fields do, or are no protobuf message")


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 0x7F:
        encoded.append(value & 0x7F | 0x80)
        value >>= 7
    encoded.append(value)
    return bytes(encoded)
