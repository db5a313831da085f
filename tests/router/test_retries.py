"""Failover and retries over real sockets, and what of a pool's failure reaches the client."""

import gc
import random
from types import FrameType

import grpc
import pytest
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from deployments.router.retries import RetryBudget, pause_s
from deployments.router.sections import RetrySettings
from encoder.v1 import encoder_pb2 as pb

from .fake_pool import REPLICA_DIED, Failure, FakePool, PoolServer
from .harness import eventually, failure_of, fleet, images, texts

Code = grpc.StatusCode

RAY_TRACEBACK = (
    "\x1b[36mray::ServeReplica:vision-cpu:encoder.handle_request_with_rejection()\x1b[39m (pid=4242, ip=10.1.2.3, "
    "actor_id=0123456789abcdef01234567, repr=<ray.serve._private.replica.ServeReplica object at 0x7f>)\n"
    '  File "/app/lib/python3.11/site-packages/ray/serve/_private/utils.py", line 1, in call\n'
    "    raise cause\n"
    "ValueError: secret thing at 10.1.2.3:40000"
)


def rich(code: grpc.StatusCode, message: str, *details: object) -> tuple[tuple[str, bytes], ...]:
    status = status_pb2.Status(code=code.value[0], message=message)
    for detail in details:
        packed = any_pb2.Any()
        packed.Pack(detail)
        status.details.append(packed)
    return (("grpc-status-details-bin", status.SerializeToString()),)


@pytest.mark.parametrize(
    "failure",
    [
        Failure(Code.UNAVAILABLE, "draining"),
        Failure(Code.RESOURCE_EXHAUSTED, "Request dropped due to backpressure"),
        Failure(Code.CANCELLED, "Client for request r disconnected."),
        Failure(
            Code.NOT_FOUND, "Application 'vision-a' not found. Ping /ray.serve.RayServeAPIService/ListApplications"
        ),
    ],
    ids=lambda failure: failure.code.name,
)
async def test_what_another_pool_may_mend_goes_to_another_pool(failure: Failure) -> None:
    # Without speeds, equal pools are taken in order: the first one fails.
    first, second = FakePool("vision-a"), FakePool("vision-b")
    async with fleet(first, second) as started:
        for pool in (first, second):
            pool.failures.append(failure)
        answer = await started.stub.EncodeImages(images(b"x"), timeout=10)
        # Both have failed once, so both were asked before one was asked again.
        assert not first.failures
        assert not second.failures
        assert answer.results[0].HasField("embedding")
    assert len(first.requests) + len(second.requests) == 3


@pytest.mark.parametrize("hedge", [None, 5_000.0])
@pytest.mark.parametrize("method", ["EncodeImages", "EncodeStream"])
async def test_a_failed_call_leaves_nothing_in_circles(method: str, hedge: float | None) -> None:
    """Frames of a traceback that lead to their own error hold the request's bytes until the collector comes by."""
    pool = FakePool("vision-a")
    async with fleet(pool, hedge={"after_ms": hedge}) as started:

        async def fail() -> None:
            pool.failures.append(Failure(Code.INVALID_ARGUMENT, "too many"))
            if method == "EncodeImages":
                await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
            else:
                items = iter([pb.EncodeStreamRequest(id="1", image=pb.Image(encoded=b"x"))])
                answers = [answer async for answer in started.stub.EncodeStream(items, timeout=10)]
                assert [answer.error.code for answer in answers] == [3]

        await fail()
        gc.collect()
        gc.disable()
        try:
            before = len(frames_of_the_router())
            for _ in range(5):
                await fail()
            kept = frames_of_the_router()[before:]
        finally:
            gc.enable()
    # gRPC keeps the error by which a call was ended, and so the frame that raised it, without the request.
    assert {frame.f_code.co_name for frame in kept} <= {"_serve_unary"}
    assert [frame for frame in kept if "request" in frame.f_locals] == []


def frames_of_the_router() -> list[FrameType]:
    found = [thing for thing in gc.get_objects() if isinstance(thing, FrameType)]
    return [frame for frame in found if "deployments/router" in frame.f_code.co_filename]


async def test_the_only_pool_is_asked_again() -> None:
    pool = FakePool("vision-a")
    async with fleet(pool) as started:
        pool.failures.extend([Failure(Code.UNAVAILABLE, "draining")] * 2)
        await started.stub.EncodeImages(images(b"x"), timeout=10)
    assert len(pool.requests) == 3


async def test_attempts_end() -> None:
    pool = FakePool("vision-a")
    async with fleet(pool, retry={"attempts": 4, "backoff_s": 0.01}) as started:
        pool.failures.extend([Failure(Code.UNAVAILABLE, "draining")] * 10)
        error = await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
    assert error.code() is Code.UNAVAILABLE
    assert error.details() == "pool 'vision-a' is not available (draining): try again later"
    assert len(pool.requests) == 4


async def test_the_budget_ends_retries_when_everything_fails() -> None:
    pool = FakePool("vision-a")
    async with fleet(
        pool, retry={"attempts": 10, "backoff_s": 0.0, "budget_burst": 5.0, "budget_ratio": 0.1}
    ) as started:
        pool.failures.extend([Failure(Code.UNAVAILABLE)] * 1000)
        for _ in range(10):
            await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
    # 10 requests, the 5 retries saved up, and none of the tenth part earned by each of ten requests but the last one.
    assert len(pool.requests) == 15


async def test_no_retry_begins_that_could_not_end_in_time() -> None:
    pool = FakePool("vision-a")
    delay = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=60))
    async with fleet(pool) as started:
        pool.failures.append(
            Failure(Code.RESOURCE_EXHAUSTED, "queue full", rich(Code.RESOURCE_EXHAUSTED, "queue full", delay))
        )
        error = await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
    # The pool asked for more time than there is: its own words come back, with its wish.
    assert error.code() is Code.RESOURCE_EXHAUSTED
    assert len(pool.requests) == 1
    status = rpc_status.from_call(error)
    info = error_details_pb2.RetryInfo()
    assert status.details[0].Unpack(info)
    assert info.retry_delay.seconds == 60


async def test_a_pools_wish_to_wait_does_not_hold_for_another_pool() -> None:
    first, second = FakePool("vision-a"), FakePool("vision-b")
    delay = error_details_pb2.RetryInfo(retry_delay=duration_pb2.Duration(seconds=60))
    full = Failure(Code.RESOURCE_EXHAUSTED, "queue full", rich(Code.RESOURCE_EXHAUSTED, "queue full", delay))
    async with fleet(first, second) as started:
        for pool in (first, second):
            pool.failures.append(full)
            pool.released.clear()
        call = started.stub.EncodeImages(images(b"x"), timeout=20)
        await eventually(lambda: first.in_flight + second.in_flight == 1)
        other = second if first.in_flight else first
        other.failures.clear()
        for pool in (first, second):
            pool.released.set()
        answer = await call
    assert answer.provenance.pool == other.name


@pytest.mark.parametrize(
    "failure",
    [
        Failure(Code.INVALID_ARGUMENT, "513 images are above the limit of 512"),
        Failure(Code.FAILED_PRECONDITION, "this model has no text tower"),
        Failure(Code.INTERNAL, "the forward failed"),
        Failure(Code.RESOURCE_EXHAUSTED, "Received message larger than max (20 vs. 10)"),
        Failure(Code.DEADLINE_EXCEEDED, "Request timed out after 5s."),
    ],
    ids=lambda failure: failure.code.name,
)
async def test_what_no_other_try_mends_is_not_tried_again(failure: Failure) -> None:
    first, second = FakePool("vision-a"), FakePool("vision-b")
    async with fleet(first, second) as started:
        for pool in (first, second):
            pool.failures.append(failure)
        error = await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
    assert error.code() is failure.code
    assert len(first.requests) + len(second.requests) == 1


async def test_a_traceback_of_ray_becomes_one_clean_line() -> None:
    pool = FakePool("text", tower="text")
    async with fleet(pool) as started:
        pool.failures.append(Failure(Code.INTERNAL, RAY_TRACEBACK))
        error = await failure_of(started.stub.EncodeText(texts("x"), timeout=10))
    assert error.code() is Code.INTERNAL
    assert error.details() == "pool 'text' failed: ValueError"


async def test_a_dead_replica_is_unavailable_and_shows_nothing_of_the_inside() -> None:
    pool = FakePool("vision-a")
    async with fleet(pool, retry={"attempts": 1}) as started:
        pool.failures.append(Failure(Code.INTERNAL, REPLICA_DIED))
        error = await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
    assert error.code() is Code.UNAVAILABLE
    assert error.details() == "a replica of pool 'vision-a' died while it worked on this: try again"


async def test_rich_details_come_back_but_for_stack_traces() -> None:
    pool = FakePool("vision-a")
    field = error_details_pb2.BadRequest(
        field_violations=[error_details_pb2.BadRequest.FieldViolation(field="options.dimensions", description="> 8")]
    )
    debug = error_details_pb2.DebugInfo(stack_entries=["File secret.py"])
    message = "dimensions is above 8"
    async with fleet(pool) as started:
        pool.failures.append(
            Failure(Code.INVALID_ARGUMENT, message, rich(Code.INVALID_ARGUMENT, message, field, debug))
        )
        error = await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
    # from_call raises when code or message differ from the call's own.
    status = rpc_status.from_call(error)
    assert status.message == message
    assert len(status.details) == 1
    got = error_details_pb2.BadRequest()
    assert status.details[0].Unpack(got)
    assert got == field


async def test_a_pool_that_dies_with_calls_under_way_is_replaced_by_another() -> None:
    first, second = FakePool("vision-a"), FakePool("vision-b")
    async with fleet(first, second) as started:
        for pool in (first, second):
            pool.released.clear()
        call = started.stub.EncodeImages(images(b"x"), timeout=20)
        await eventually(lambda: first.in_flight + second.in_flight == 1)
        dying, other = (first, second) if first.in_flight else (second, first)
        other.released.set()
        await started.servers[dying.name].stop()
        answer = await call
    assert answer.provenance.pool == other.name


async def test_a_pool_without_anyone_listening_is_unavailable_without_its_address() -> None:
    pool = FakePool("vision-a")
    async with fleet(pool, retry={"attempts": 2}, health={"failures": 1000}) as started:
        server = started.servers["vision-a"]
        await server.stop()
        error = await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
        assert error.code() is Code.UNAVAILABLE
        assert error.details() == "pool 'vision-a' is not available: try again later"
        # And it is found again when it is back.
        async with PoolServer([pool], port=server.port):
            await eventually(lambda: started.state("vision-a").healthy)
            for _ in range(100):
                try:
                    await started.stub.EncodeImages(images(b"x"), timeout=10)
                    break
                except grpc.aio.AioRpcError as again:
                    assert again.code() is Code.UNAVAILABLE
            else:
                raise AssertionError("the pool came back, but was not reached again")


def test_the_budget_is_earned_by_requests() -> None:
    budget = RetryBudget(RetrySettings(budget_ratio=0.5, budget_burst=2.0))
    assert [budget.spend() for _ in range(3)] == [True, True, False]
    budget.earn()
    assert not budget.spend()
    budget.earn()
    assert budget.spend()
    for _ in range(100):
        budget.earn()
    assert [budget.spend() for _ in range(3)] == [True, True, False]


def test_pauses_double_up_to_their_bound_and_keep_to_what_the_pool_asked() -> None:
    settings = RetrySettings(backoff_s=0.1, backoff_max_s=0.5)
    chance = random.Random(1)
    for attempt, longest in ((1, 0.1), (2, 0.2), (3, 0.4), (4, 0.5), (9, 0.5)):
        pauses = [pause_s(settings, attempt, 0.0, chance) for _ in range(200)]
        assert 0.0 <= min(pauses) < 0.1 * longest
        assert 0.9 * longest < max(pauses) <= longest
    assert min(pause_s(settings, 1, 2.0, chance) for _ in range(50)) >= 2.0
