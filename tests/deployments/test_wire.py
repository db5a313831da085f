"""Wire messages and the encoder's types."""

import grpc
import numpy as np
import pytest
from google.rpc import error_details_pb2, status_pb2

from deployments import wire
from encoder.errors import DeadlinePassed, InvalidInput, Overloaded, Unsupported
from encoder.outputs import FinishedVector, OutputOptions
from encoder.v1 import encoder_pb2 as pb


@pytest.mark.parametrize(
    ("dtype", "name"),
    [
        (pb.EMBEDDING_DTYPE_UNSPECIFIED, "float32"),
        (pb.EMBEDDING_DTYPE_FLOAT32, "float32"),
        (pb.EMBEDDING_DTYPE_FLOAT16, "float16"),
        (pb.EMBEDDING_DTYPE_INT8, "int8"),
        (pb.EMBEDDING_DTYPE_BINARY, "binary"),
    ],
)
def test_every_dtype_of_the_contract_is_known(dtype, name):
    assert wire.options_from_proto(pb.EncodeOptions(dtype=dtype)).output.dtype == name


def test_options():
    plain = wire.options_from_proto(pb.EncodeOptions())
    assert plain == wire.CallOptions("", "", OutputOptions("float32", 0, True), "truncate")
    full = wire.options_from_proto(
        pb.EncodeOptions(model="m", pool="p", dimensions=3, normalize=False, text_overflow=pb.TEXT_OVERFLOW_REFUSE)
    )
    assert full == wire.CallOptions("m", "p", OutputOptions("float32", 3, False), "refuse")
    assert wire.options_from_proto(pb.EncodeOptions(normalize=True)).output.normalize is True


@pytest.mark.parametrize("options", [pb.EncodeOptions(dtype=99), pb.EncodeOptions(text_overflow=99)])
def test_enum_values_of_a_later_contract_are_refused(options):
    with pytest.raises(InvalidInput, match="99 is unknown"):
        wire.options_from_proto(options)


def test_embedding():
    values = np.arange(3, dtype="<f2").tobytes()
    embedding = wire.embedding_to_proto(FinishedVector(values, "float16", 3))
    assert (embedding.values, embedding.dtype, embedding.dimensions) == (values, pb.EMBEDDING_DTYPE_FLOAT16, 3)
    scaled = wire.embedding_to_proto(FinishedVector(b"\x01", "int8", 1, 0.25))
    assert (scaled.dtype, scaled.scale) == (pb.EMBEDDING_DTYPE_INT8, 0.25)


def test_the_projects_errors_speak_and_others_do_not():
    assert wire.status_of(Unsupported("a\n  b")) == status_pb2.Status(code=9, message="a b")
    hidden = wire.status_of(KeyError("/secret/path"))
    assert hidden.code == 13 and "secret" not in hidden.message


def test_a_failure_without_details_needs_no_metadata():
    failure = wire.call_failure(DeadlinePassed("late"))
    assert failure == (grpc.StatusCode.DEADLINE_EXCEEDED, "late", ())


def test_a_refused_call_says_when_to_come_back():
    failure = wire.call_failure(Overloaded("full"), retry_after_s=1.25)
    assert failure.code is grpc.StatusCode.RESOURCE_EXHAUSTED
    ((key, value),) = failure.trailing_metadata
    assert key == "grpc-status-details-bin"
    status = status_pb2.Status.FromString(value)
    assert (status.code, status.message) == (8, "full")
    info = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert (info.retry_delay.seconds, info.retry_delay.nanos) == (1, 250_000_000)
    assert wire.retry_delay_s(failure.trailing_metadata) == 1.25
    assert wire.retry_delay_s((("request_id", "x"),)) is None


def test_remaining_time():
    assert wire.timeout_s((("other", "1"),)) is None
    assert wire.timeout_s(((wire.DEADLINE_METADATA, "1500"),)) == 1.5
    assert wire.timeout_s(((wire.DEADLINE_METADATA, b"12.5"),)) == 0.0125
    assert wire.timeout_s(((wire.DEADLINE_METADATA, "-3"),)) == 0.0
    for wrong in ("soon", "", "nan", "inf"):
        with pytest.raises(InvalidInput, match=wire.DEADLINE_METADATA):
            wire.timeout_s(((wire.DEADLINE_METADATA, wrong),))


def test_the_router_sends_the_header_that_pools_read():
    from deployments.router.calls import TIMEOUT_METADATA

    assert TIMEOUT_METADATA == wire.DEADLINE_METADATA


def test_long_messages_fit_a_trailer():
    line = wire.one_line("x\n" * 5000)
    assert len(line) == wire.MAX_MESSAGE_CHARACTERS and line.endswith("…") and "\n" not in line
