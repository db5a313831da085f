"""What the client is told of a pool's words, and what another try may mend."""

import grpc
import pytest
from google.protobuf import any_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc.aio import AioRpcError, Metadata

from deployments.router.failures import MAX_DETAILS_CHARACTERS, MAX_STATUS_BYTES, clean, read_failure

Code = grpc.StatusCode
ADDRESS = "serve-head.vitfleet.svc:9000"
# As seen of Ray 2.60 behind HAProxy and behind the stock proxy.
UNREADABLE = (
    "Unexpected <class 'google.protobuf.message.DecodeError'>: Error parsing message with type 'encoder.v1.{}': "
    "Wire format was corrupt"
)


def error(code: grpc.StatusCode, details: str, *trailers: tuple[str, bytes]) -> AioRpcError:
    return AioRpcError(code, Metadata(), Metadata(*trailers), details=details)


@pytest.mark.parametrize(
    ("details", "told"),
    [
        ("dimensions=9 is above 8", "dimensions=9 is above 8"),
        ("two\n  lines\tof text", "two lines of text"),
        (f"cannot reach {ADDRESS} now", "cannot reach (address) now"),
        ("at 10.0.0.7:40000 and 10.0.0.8", "at (address) and (address)"),
        ("ipv4:127.0.0.1:1234: refused", "(address) refused"),
        ("at [fd00::1]:9000", "at (address)"),
        ("on localhost:9000", "on (address)"),
        ("worker pid=4242, ip=10.1.2.3 failed", "worker failed"),
        ("process pid 77 ended", "process a process ended"),
        ("actor 0123456789abcdef01234567 is busy", "actor (id) is busy"),
        ("no file /root/models/clip/model.safetensors there", "no file (path) there"),
        ("12/16 pixels, 3:4 ratio, v1.2.3", "12/16 pixels, 3:4 ratio, v1.2.3"),
        ("", ""),
    ],
)
def test_cleaning(details: str, told: str) -> None:
    assert clean(details, ADDRESS) == told


def test_a_traceback_leaves_only_its_errors_name() -> None:
    trace = 'Traceback (most recent call last):\n  File "/a/b.py", line 3, in f\nencoder.errors.NoError: secret\n'
    assert clean(trace) == "NoError"
    assert clean('  File "/a/b.py", line 3, in f\n    cut off here') == ""


def test_long_details_are_cut() -> None:
    assert len(clean("word " * 1000)) == MAX_DETAILS_CHARACTERS


@pytest.mark.parametrize(
    ("code", "details", "told", "retryable", "doubtful"),
    [
        (Code.UNAVAILABLE, "failed to connect to all addresses; last error: ...", Code.UNAVAILABLE, True, True),
        (Code.UNAVAILABLE, "", Code.UNAVAILABLE, True, True),
        (Code.INTERNAL, "Received RST_STREAM with error code 2", Code.UNAVAILABLE, True, True),
        (Code.UNKNOWN, "Stream removed", Code.UNAVAILABLE, True, True),
        (Code.UNKNOWN, "Received http2 header with status: 500", Code.UNAVAILABLE, True, True),
        (Code.UNKNOWN, "Received http2 header with status: 400", Code.INTERNAL, False, True),
        (Code.INTERNAL, "ActorUnavailableError: The actor is temporarily unavailable", Code.UNAVAILABLE, True, True),
        (
            Code.INTERNAL,
            "Replica Replica(id='x1', deployment='encoder') is no longer available.",
            Code.UNAVAILABLE,
            True,
            True,
        ),
        (Code.INTERNAL, "The worker died unexpectedly while executing this task.", Code.UNAVAILABLE, True, True),
        (Code.ABORTED, "aborted", Code.UNAVAILABLE, True, True),
        (Code.RESOURCE_EXHAUSTED, "", Code.RESOURCE_EXHAUSTED, True, False),
        (Code.RESOURCE_EXHAUSTED, "Sent message larger than max (2 vs. 1)", Code.RESOURCE_EXHAUSTED, False, False),
        (
            Code.NOT_FOUND,
            "Application metadata not set. Ping /x/ListApplications for ...",
            Code.UNAVAILABLE,
            True,
            True,
        ),
        (Code.NOT_FOUND, "model 'x' is not served: choose 'clip'", Code.NOT_FOUND, False, False),
        (Code.DEADLINE_EXCEEDED, "Deadline Exceeded", Code.DEADLINE_EXCEEDED, False, True),
        (Code.INVALID_ARGUMENT, "bad", Code.INVALID_ARGUMENT, False, False),
        (Code.UNIMPLEMENTED, "Method not found!", Code.UNIMPLEMENTED, False, False),
        (Code.INTERNAL, "Exception deserializing request!", Code.INVALID_ARGUMENT, False, False),
        (Code.UNKNOWN, UNREADABLE.format("EncodeTextRequest"), Code.INVALID_ARGUMENT, False, False),
        # Not the caller's fault.
        (Code.UNKNOWN, UNREADABLE.format("EncodeTextResponse"), Code.INTERNAL, False, True),
        (Code.INTERNAL, "boom", Code.INTERNAL, False, True),
        (Code.DATA_LOSS, "boom", Code.INTERNAL, False, True),
    ],
)
def test_meaning(code: grpc.StatusCode, details: str, told: grpc.StatusCode, retryable: bool, doubtful: bool) -> None:
    failure = read_failure(error(code, details), "vision-a", ADDRESS)
    assert failure.error.code is told
    assert (failure.retryable, failure.doubtful) == (retryable, doubtful)
    assert failure.error.message
    assert "\n" not in failure.error.message
    assert failure.cause.startswith(code.name)


@pytest.mark.parametrize(
    ("code", "details", "died"),
    [
        # As seen of Ray 2.60 when a replica is killed in the middle of a call: HAProxy, then the stock proxy.
        (Code.UNAVAILABLE, "Stream removed (RST_STREAM (Received RST_STREAM with error code 7))", True),
        (Code.UNKNOWN, "Received http2 header with status: 500", True),
        (Code.INTERNAL, "The actor died unexpectedly before finishing this task.\n\tclass_name: ServeReplica", True),
        (Code.UNAVAILABLE, "Received http2 header with status: 502", True),
        (Code.UNAVAILABLE, "recvmsg:Connection reset by peer", True),
        (Code.UNAVAILABLE, "Socket closed", True),
        # Nobody was there.
        (Code.UNAVAILABLE, "failed to connect to all addresses; last error: Connection refused", False),
        (Code.UNAVAILABLE, "Received http2 header with status: 503", False),
        (Code.UNAVAILABLE, "draining", False),
        # The replica lives.
        (Code.RESOURCE_EXHAUSTED, "queue full", False),
        (Code.DEADLINE_EXCEEDED, "Stream removed (Deadline Exceeded)", False),
        (Code.INTERNAL, "the forward failed", False),
        (Code.INVALID_ARGUMENT, "the actor died", False),
    ],
)
def test_whether_a_replica_was_lost_under_the_call(code: grpc.StatusCode, details: str, died: bool) -> None:
    assert read_failure(error(code, details), "vision-a", ADDRESS).died is died


def test_a_rich_status_of_another_code_than_the_client_gets_is_left_out() -> None:
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.ErrorInfo(reason="X"))
    status = status_pb2.Status(code=Code.INTERNAL.value[0], message="The actor died", details=[packed])
    failure = read_failure(
        error(Code.INTERNAL, "The actor died", ("grpc-status-details-bin", status.SerializeToString())), "p", ADDRESS
    )
    assert failure.error.code is Code.UNAVAILABLE
    assert failure.error.trailers() == ()
    assert failure.error.status().code == Code.UNAVAILABLE.value[0]


@pytest.mark.parametrize("value", [b"\xff\xff not a status", b""])
def test_unusable_rich_statuses_are_left_out(value: bytes) -> None:
    failure = read_failure(error(Code.INVALID_ARGUMENT, "bad", ("grpc-status-details-bin", value)), "p", ADDRESS)
    assert failure.error.trailers() == ()
    assert failure.error.message == "bad"


def test_a_rich_status_too_large_for_trailers_is_left_out() -> None:
    packed = any_pb2.Any()
    packed.Pack(error_details_pb2.ErrorInfo(reason="X" * MAX_STATUS_BYTES))
    status = status_pb2.Status(code=3, message="bad", details=[packed])
    failure = read_failure(
        error(Code.INVALID_ARGUMENT, "bad", ("grpc-status-details-bin", status.SerializeToString())), "p", ADDRESS
    )
    assert failure.error.trailers() == ()
