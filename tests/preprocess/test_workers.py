"""Decode workers: a crash or a hang costs one picture; the worker is replaced; nothing is left behind."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import psutil
import pytest
from PIL import Image

from encoder.errors import DecoderLost, InvalidImage, NotReady
from encoder.preprocess import workers
from encoder.preprocess.decode import DecodeLimits, DecodePolicy, decode_image
from encoder.preprocess.isolation import Decoder, Isolation
from tests.preprocess.pictures import file_of, photo

GLASS = photo(40, 61, "RGBA")
GLASS.putalpha(photo(40, 61, "L", seed=5))
FILES = {
    "JPEG": file_of(photo(40, 61), "JPEG"),
    "PNG": file_of(GLASS, "PNG"),
    "WEBP": file_of(photo(40, 61), "WEBP"),
    "GIF": file_of(photo(40, 61, "P"), "GIF"),
    "BMP": file_of(photo(40, 61), "BMP"),
    "TIFF": file_of(photo(40, 61), "TIFF", compression="tiff_lzw"),
    "AVIF": file_of(photo(40, 61), "AVIF"),
}
IN_A_WORKER = {"WEBP", "GIF", "BMP", "TIFF", "AVIF"}
PLAIN = (DecodeLimits(), DecodePolicy())


def until(condition: Callable[[], bool], limit_s: float = 20.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "it never came to be"
        time.sleep(0.01)


@pytest.fixture
def make() -> Iterator[Callable[..., Decoder]]:
    made: list[Decoder] = []

    def decoder(isolation: Isolation = "process", time_limit_s: float = 30.0, **policy: object) -> Decoder:
        made.append(Decoder(DecodeLimits(max_pixels=2_000_000), DecodePolicy(**policy), isolation, time_limit_s))  # type: ignore[arg-type]
        return made[-1]

    yield decoder
    for one in made:
        one.close()


@pytest.fixture
def misbehaving(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "WORKER_MODULE", "tests.preprocess.misbehaving_worker")


class TestPixels:
    @pytest.mark.parametrize("isolation", ["thread", "auto", "process"])
    def test_are_the_same_wherever_they_are_made(self, make: Callable[..., Decoder], isolation: Isolation) -> None:
        decoder = make(isolation)
        for name, data in FILES.items():
            found = decoder.decode(data)
            assert np.array_equal(found, decode_image(data)), name
            assert found.dtype == np.uint8 and found.flags.writeable and found.flags.c_contiguous
        in_worker = {"thread": 0, "auto": len(IN_A_WORKER), "process": len(FILES)}[isolation]
        assert decoder.counters().get("decoded_in_worker", 0) == in_worker
        assert len(decoder.worker_pids) == (1 if in_worker else 0)

    def test_of_growing_and_shrinking_pictures(self, make: Callable[..., Decoder]) -> None:
        decoder = make()
        for size in ((3, 4), (1000, 1500), (5, 1), (1, 1), (900, 1300)):
            data = file_of(photo(*size), "PNG")
            assert np.array_equal(decoder.decode(memoryview(data)), decode_image(data))

    def test_follow_the_policy(self, make: Callable[..., Decoder]) -> None:
        policy = DecodePolicy(apply_exif_orientation=False, background=(9, 99, 199), allow_truncated=True)
        decoder = make(apply_exif_orientation=False, background=(9, 99, 199), allow_truncated=True)
        exif = b"Exif\0\0II*\0\x08\0\0\0\x01\0\x12\x01\x03\0\x01\0\0\0\x06\0\0\0\0\0\0\0"
        turned, cut = file_of(photo(9, 20), "JPEG", exif=exif), FILES["TIFF"][:3000]
        for data in (FILES["PNG"], turned, file_of(photo(90, 90), "PNG")[:4000]):
            assert np.array_equal(decoder.decode(data), decode_image(data, policy=policy))
        assert not np.array_equal(decoder.decode(FILES["PNG"]), decode_image(FILES["PNG"]))
        with pytest.raises(InvalidImage):
            decoder.decode(cut)

    @pytest.mark.parametrize("isolation", ["thread", "auto", "process"])
    def test_errors_are_the_same_wherever_they_are_found(
        self, make: Callable[..., Decoder], isolation: Isolation
    ) -> None:
        decoder = make(isolation)
        bad = [b"", b"hello", FILES["WEBP"][:99], FILES["TIFF"][:400], file_of(photo(1500, 1500), "BMP")]
        for data in [*bad, bytes(33 << 20)]:
            with pytest.raises(InvalidImage) as expected:
                decode_image(data, decoder.limits)
            with pytest.raises(InvalidImage) as found:
                decoder.decode(data)
            assert str(found.value) == str(expected.value)
        assert decoder.counters().get("decode_workers_lost", 0) == 0

    def test_rare_heavy_and_large_ones_go_to_a_worker(self, make: Callable[..., Decoder]) -> None:
        """Time grows with the scans of a progressive file, which no thread could be stopped in."""
        decoder = Decoder(*PLAIN, "auto")
        heavy = file_of(photo(2000, 2400), "JPEG", progressive=True)
        rare = FILES["JPEG"][:-2] + bytes(9) + FILES["JPEG"][-2:]
        large = file_of(Image.new("1", (8000, 4001)), "PNG")
        try:
            for data, seen in ((FILES["JPEG"], 0), (FILES["PNG"], 0), (heavy, 1), (rare, 2), (large, 3)):
                assert np.array_equal(decoder.decode(data), decode_image(data))
                assert decoder.counters().get("decoded_in_worker", 0) == seen
        finally:
            decoder.close()


@pytest.mark.usefixtures("misbehaving")
class TestMisbehaviour:
    @pytest.mark.parametrize(
        ("fate", "kind", "told"),
        [
            (b"CRASH", InvalidImage, "the picture crashed its decoder, which ended by signal 11"),
            (b"LEAVE", DecoderLost, "ended with exit status 7 before the picture was decoded"),
            (b"RAISE", DecoderLost, "ended with exit status 1"),
            (b"SHAPE", DecoderLost, "fewer pixels than it told of"),
            (b"GREED", DecoderLost, "ended with exit status 1"),
        ],
    )
    def test_costs_one_picture_and_its_worker(
        self, make: Callable[..., Decoder], fate: bytes, kind: type[Exception], told: str
    ) -> None:
        decoder = make()
        assert decoder.decode(FILES["BMP"]).shape == (40, 61, 3)
        (before,) = decoder.worker_pids
        with pytest.raises(kind, match=told):
            decoder.decode(FILES["BMP"] + fate)
        (after,) = decoder.worker_pids
        assert after != before and not psutil.pid_exists(before)
        assert np.array_equal(decoder.decode(FILES["TIFF"]), decode_image(FILES["TIFF"]))
        assert decoder.worker_pids == [after]
        assert decoder.counters()["decode_workers_lost"] == 1

    def test_a_size_beyond_the_limits_is_not_believed(self, make: Callable[..., Decoder]) -> None:
        with pytest.raises(InvalidImage, match="over the limit"):
            make().decode(FILES["BMP"] + b"GIANT")

    def test_a_hang_is_ended_at_the_time_limit(self, make: Callable[..., Decoder]) -> None:
        decoder = make(time_limit_s=0.5)
        decoder.start(1)
        (before,) = decoder.worker_pids
        with pytest.raises(InvalidImage, match=r"took longer than 0\.5 s and was stopped"):
            decoder.decode(FILES["BMP"] + b"SLEEP")
        assert not psutil.pid_exists(before) and before not in decoder.worker_pids
        assert np.array_equal(decoder.decode(FILES["BMP"]), decode_image(FILES["BMP"]))

    def test_a_worker_that_is_killed_while_it_decodes(self, make: Callable[..., Decoder]) -> None:
        decoder = make()
        decoder.start(1)
        (pid,) = decoder.worker_pids
        with ThreadPoolExecutor(2) as pool:
            hanging = pool.submit(decoder.decode, FILES["BMP"] + b"SLEEP")
            until(lambda: _sleeps(pid))
            neighbour = pool.submit(decoder.decode, FILES["GIF"])
            assert np.array_equal(neighbour.result(60), decode_image(FILES["GIF"]))
            os.kill(pid, signal.SIGKILL)
            with pytest.raises(DecoderLost, match="ended by signal 9"):
                hanging.result(60)
        assert pid not in decoder.worker_pids and len(decoder.worker_pids) == 2
        assert np.array_equal(decoder.decode(FILES["BMP"]), decode_image(FILES["BMP"]))

    def test_a_worker_that_died_while_idle_costs_nothing(self, make: Callable[..., Decoder]) -> None:
        decoder = make()
        decoder.decode(FILES["BMP"])
        (pid,) = decoder.worker_pids
        os.kill(pid, signal.SIGKILL)
        # Waitable is later than a zombie: its threads have gone as well.
        until(lambda: os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None)
        assert np.array_equal(decoder.decode(FILES["BMP"]), decode_image(FILES["BMP"]))
        assert not psutil.pid_exists(pid)

    def test_many_threads_with_good_and_bad_pictures(self, make: Callable[..., Decoder]) -> None:
        decoder = make()
        data = [FILES["BMP"] + fate for fate in (b"", b"LEAVE", b"", b"CRASH", b"", b"")] * 4
        expected = decode_image(FILES["BMP"])

        def attempt(content: bytes) -> bool:
            try:
                return np.array_equal(decoder.decode(content), expected)
            except (InvalidImage, DecoderLost):
                return content != FILES["BMP"]

        with ThreadPoolExecutor(4) as pool:
            assert all(pool.map(attempt, data))
        assert decoder.counters() == {"decoded_in_worker": 24, "decode_workers_lost": 8}
        assert len(decoder.worker_pids) <= 4

    def test_close_ends_what_hangs_and_what_is_idle(self, make: Callable[..., Decoder]) -> None:
        decoder = make(time_limit_s=600.0)
        decoder.start(2)
        pids = decoder.worker_pids
        with ThreadPoolExecutor(1) as pool:
            hanging = pool.submit(decoder.decode, FILES["BMP"] + b"SLEEP")
            until(lambda: any(_sleeps(pid) for pid in pids))
            decoder.close()
            with pytest.raises(NotReady, match="shutting down"):
                hanging.result(20)
        assert not any(psutil.pid_exists(pid) for pid in pids) and decoder.worker_pids == []
        with pytest.raises(NotReady):
            decoder.decode(FILES["BMP"])
        decoder.close()

    def test_nothing_of_a_lost_worker_stays_open(self, make: Callable[..., Decoder]) -> None:
        decoder = make()
        decoder.decode(FILES["BMP"])
        before = len(os.listdir("/proc/self/fd"))  # noqa: PTH208
        for _ in range(3):
            with pytest.raises(InvalidImage):
                decoder.decode(FILES["BMP"] + b"CRASH")
        decoder.decode(FILES["BMP"])
        assert len(os.listdir("/proc/self/fd")) == before  # noqa: PTH208


def test_a_worker_is_replaced_after_many_pictures(
    make: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a decoder leaks over corrupt files ends with its process."""
    monkeypatch.setattr(workers, "MAX_PICTURES", 3)
    decoder, seen = make(), set()
    for _ in range(7):
        decoder.decode(FILES["BMP"])
        seen.update(decoder.worker_pids)
    assert len(seen) == 3 and decoder.counters() == {"decoded_in_worker": 7}


def test_a_worker_that_does_not_start(make: Callable[..., Decoder], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "WORKER_MODULE", "tests.preprocess.no_such_module")
    with pytest.raises(DecoderLost, match=r"did not start \(exit status 1\)"):
        make().decode(FILES["BMP"])


PARENT = """
import sys, threading
from encoder.preprocess import workers
workers.WORKER_MODULE = "tests.preprocess.misbehaving_worker"
from encoder.preprocess.isolation import Decoder
from encoder.preprocess.policy import DecodeLimits, DecodePolicy
decoder = Decoder(DecodeLimits(), DecodePolicy(), "process", 2.0)
data = sys.stdin.buffer.read()
decoder.start(2)
decoder.decode(data)
threading.Thread(target=decoder.decode, args=(data + b"SLEEP",), daemon=True).start()
print(*decoder.worker_pids, flush=True)
threading.Event().wait()
"""


def test_workers_end_with_a_parent_that_is_killed() -> None:
    """The idle one sees its stdin end, the one that hangs is ended by its own alarm."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    with subprocess.Popen(
        [sys.executable, "-c", PARENT], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment
    ) as parent:
        assert parent.stdin is not None and parent.stdout is not None
        parent.stdin.write(FILES["BMP"])
        parent.stdin.close()
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        until(lambda: any(_sleeps(pid) for pid in pids))
        parent.kill()
    assert len(pids) == 2
    until(lambda: not any(_is_running(pid) for pid in pids))


def test_workers_import_neither_torch_nor_ray() -> None:
    code = (
        "import sys, encoder.preprocess.worker, encoder.preprocess.isolation;"
        "sys.exit(any(name in sys.modules for name in ('torch', 'ray', 'transformers', 'grpc', 'pydantic')))"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_threads_wait_for_no_one(make: Callable[..., Decoder]) -> None:
    """As many workers as threads that decode at once, and no more."""
    decoder, start = make(), threading.Barrier(3)

    def work(_: int) -> None:
        start.wait()
        for _ in range(5):
            decoder.decode(FILES["TIFF"])

    with ThreadPoolExecutor(3) as pool:
        list(pool.map(work, range(3)))
    assert 1 <= len(decoder.worker_pids) <= 3


def _sleeps(pid: int) -> bool:
    """Whether the misbehaving worker has come to the picture that it sleeps over."""
    return Path(f"/proc/{pid}/comm").read_text().strip() == "asleep"


def _is_running(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
