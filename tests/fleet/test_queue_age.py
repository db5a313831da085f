"""A pool grows because its work waits, though its calls are few: with a real Serve in HAProxy mode."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import grpc
import pytest

from encoder.v1 import encoder_pb2 as pb
from encoder.v1 import encoder_pb2_grpc
from tests.fleet.machine import machine, pool

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1200)]
# Calls at a time to each pool, far below the target of ongoing requests; each holds pictures for seconds.
CALLERS, TARGET_CALLS, ITEMS = 2, 64, 300
SIDE = 64


@contextmanager
def load(address: str, pools: tuple[str, ...], failures: list[str]) -> Iterator[None]:
    """Each caller sends one big call after the other."""
    stop = threading.Event()
    pixels = pb.RawPixels(data=bytes(range(256)) * (SIDE * SIDE * 3 // 256), height=SIDE, width=SIDE, channels=3)
    request = pb.EncodeImagesRequest(images=[pb.Image(pixels=pixels)] * ITEMS)

    def send(name: str) -> None:
        with grpc.insecure_channel(address, options=[("grpc.max_receive_message_length", -1)]) as channel:
            stub = encoder_pb2_grpc.EncoderServiceStub(channel)
            while not stop.is_set():
                try:
                    stub.EncodeImages(request, timeout=120, metadata=(("application", name),))
                except grpc.RpcError as error:
                    failures.append(f"{name}: {error}")
                    stop.wait(0.5)

    threads = [threading.Thread(target=send, args=(name,)) for name in pools for _ in range(CALLERS)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def test_a_pool_of_slow_work_grows_by_the_age_of_its_queue(tmp_path: Path) -> None:
    by_calls = {
        "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": TARGET_CALLS, "upscale_delay_s": 1.0,
        "look_back_period_s": 3.0, "metrics_interval_s": 1.0,
    }  # fmt: skip
    by_age = {**by_calls, "target_queue_age_s": 0.2}
    # The forward of a health check waits behind big calls.
    patient = {"health_forward_timeout_s": 60.0, "max_waiting_items": 4 * CALLERS * ITEMS}
    pools = [pool("by-age", autoscaling=by_age, **patient), pool("by-calls", autoscaling=by_calls, **patient)]
    failures: list[str] = []
    with machine(tmp_path, pools, router=False) as fleet:
        assert (len(fleet.replicas("by-age")), len(fleet.replicas("by-calls"))) == (1, 1)
        with load(fleet.fleet.addresses.serve_grpc, ("by-age", "by-calls"), failures):
            fleet.until(lambda: len(fleet.replicas("by-age")) == 2, "the pool has a second replica")
            # The same load on a pool that counts calls alone: it has been there at least as long.
            assert len(fleet.replicas("by-calls")) == 1
    assert not failures
