"""Decode workers: processes that decode one picture at a time, ended and replaced when they hang or crash.

A worker is a plain subprocess with a memory file (memfd) that both sides read and write; never mapped on this side,
since a process that shortens a mapped file kills who reads it. There are as many as threads decode at once, started
when they are needed first (or by `start`). Linux.
"""

import logging
import os
import select
import signal
import subprocess
import sys
import threading
import time
from collections import Counter

import numpy as np

from encoder.errors import DecoderLost, InvalidImage, NotReady
from encoder.preprocess.policy import DecodeLimits, DecodePolicy
from encoder.preprocess.worker import ANSWER, MAX_MESSAGE_BYTES, READY, REQUEST

logger = logging.getLogger(__name__)
WORKER_MODULE = "encoder.preprocess.worker"
START_LIMIT_S = 60.0
# What a decoder leaks ends with its process.
MAX_PICTURES = 5000
# Memory that a worker keeps between pictures; more is given back.
KEEP_BYTES = 16 * 1024 * 1024
# Signals by which a process ends through its own fault: here the picture's.
CRASHES = frozenset(
    -number for number in (signal.SIGSEGV, signal.SIGBUS, signal.SIGABRT, signal.SIGFPE, signal.SIGILL, signal.SIGSYS)
)


class DecodeWorker:
    """One process; used by one thread at a time. `alive` is False once it has ended or was ended."""

    def __init__(self, limits: DecodeLimits, policy: DecodePolicy, time_limit_s: float) -> None:
        self._limits = limits
        self._time_limit_s = time_limit_s
        self._memory = os.memfd_create("vitfleet-decode", os.MFD_CLOEXEC)
        self._ready = False
        self.pictures = 0
        arguments = [
            str(self._memory), repr(time_limit_s),
            str(limits.max_bytes), str(limits.max_pixels), str(limits.max_side),
            "1" if policy.apply_exif_orientation else "0",
            ",".join(str(level) for level in policy.background),
            "1" if policy.allow_truncated else "0", str(policy.reduced_side),
        ]  # fmt: skip
        # The same modules as here, wherever this process got them from; nothing of theirs needs the environment.
        start = f"import sys; sys.path[:] = {sys.path!r}; from {WORKER_MODULE} import main; main()"
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-c", start, *arguments],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, pass_fds=(self._memory,),
        )  # fmt: skip
        assert self._process.stdin is not None and self._process.stdout is not None
        self._requests, self._answers = self._process.stdin.fileno(), self._process.stdout.fileno()

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._memory >= 0 and self._process.poll() is None

    def decode(self, content: bytes | memoryview) -> np.ndarray:
        """RGB uint8 [h, w, 3], writable. Raises InvalidImage, and DecoderLost when the process ends or cannot start.

        A picture that takes longer than the time limit, or crashes the process, is invalid.
        """
        self._wait_until_ready()
        self.pictures += 1
        self._write(content)
        try:
            os.write(self._requests, REQUEST.pack(len(content)))
        except BrokenPipeError:
            raise self._lost() from None
        answer = self._answer(self._time_limit_s)
        if answer is None:
            self.end()
            raise InvalidImage(
                f"decoding the picture took longer than {self._time_limit_s:g} s and was stopped; scale it down or "
                "save it anew"
            )
        if len(answer) < ANSWER.size:
            raise self._lost()
        decoded, height, width, _ = ANSWER.unpack(answer[: ANSWER.size])
        if not decoded:
            raise InvalidImage(answer[ANSWER.size :].decode(errors="replace"))
        return self._pixels(height, width)

    def end(self) -> int:
        """Kills the process and waits for it; gives its exit status. Any thread, any number of times."""
        self._process.kill()
        status = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                pipe.close()
        memory, self._memory = self._memory, -1
        if memory >= 0:
            os.close(memory)
        return status

    def kill(self) -> None:
        """Kills the process; the thread that waits for its answer sees it end and closes the files."""
        self._process.kill()
        self._process.wait()

    def _wait_until_ready(self) -> None:
        if self._ready:
            return
        if self._answer(START_LIMIT_S) != READY:
            status = self.end()
            raise DecoderLost(f"a decode worker did not start (exit status {status}): the picture was not decoded")
        self._ready = True

    def _answer(self, limit_s: float) -> bytes | None:
        """What the worker wrote, in one piece (it fits the pipe's atomic size); empty: it ended; None: too late."""
        poll = select.poll()
        poll.register(self._answers, select.POLLIN)
        until = time.monotonic() + limit_s
        while (remaining_s := until - time.monotonic()) > 0:
            if poll.poll(remaining_s * 1e3):
                return os.read(self._answers, ANSWER.size + MAX_MESSAGE_BYTES)
        return None

    def _lost(self) -> InvalidImage | DecoderLost:
        status = self.end()
        how = f"by signal {-status}" if status < 0 else f"with exit status {status}"
        if status in CRASHES:
            return InvalidImage(f"the picture crashed its decoder, which ended {how}; save it anew in another format")
        return DecoderLost(f"the decode worker ended {how} before the picture was decoded: try again")

    def _write(self, content: bytes | memoryview) -> None:
        view, at = memoryview(content).cast("B"), 0
        while at < len(view):
            at += os.pwrite(self._memory, view[at:], at)

    def _pixels(self, height: int, width: int) -> np.ndarray:
        self._limits.check_size(width, height)  # a process that read hostile bytes is not trusted
        pixels = np.empty((height, width, 3), dtype=np.uint8)
        view, at = pixels.data.cast("B"), 0
        while at < len(view):
            count = os.preadv(self._memory, [view[at:]], at)
            if count == 0:
                self.end()
                raise DecoderLost("the decode worker gave fewer pixels than it told of: try again")
            at += count
        if os.fstat(self._memory).st_size > KEEP_BYTES:
            os.ftruncate(self._memory, 0)
        return pixels


class DecodeWorkers:
    """All workers of one engine. `decode` from any number of threads; ended with `close`."""

    def __init__(self, limits: DecodeLimits, policy: DecodePolicy, time_limit_s: float) -> None:
        self._settings = (limits, policy, time_limit_s)
        self._lock = threading.Lock()
        self._idle: list[DecodeWorker] = []
        self._busy: set[DecodeWorker] = set()
        self._closed = False
        self._counters: Counter[str] = Counter()

    @property
    def pids(self) -> list[int]:
        """Processes that are there now."""
        with self._lock:
            return [worker.pid for worker in [*self._idle, *self._busy]]

    def counters(self) -> dict[str, int]:
        with self._lock:
            return dict(self._counters)

    def start(self, count: int) -> None:
        """Starts workers ahead of their first picture; returns at once."""
        with self._lock:
            missing = 0 if self._closed else count - len(self._idle) - len(self._busy)
            self._idle.extend(DecodeWorker(*self._settings) for _ in range(missing))

    def decode(self, content: bytes | memoryview) -> np.ndarray:
        """See `DecodeWorker.decode`. Raises NotReady after `close`."""
        worker = self._take()
        try:
            return worker.decode(content)
        except (InvalidImage, DecoderLost) as error:
            if self._closed:
                raise NotReady("this replica is shutting down: try another one") from None
            if not worker.alive:
                logger.warning("a decode worker was lost and is replaced: %s", error)
            raise
        finally:
            self._give_back(worker)

    def close(self) -> None:
        """Ends every worker; a picture under way fails with NotReady."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
            busy = list(self._busy)
        for worker in idle:
            worker.end()
        for worker in busy:
            worker.kill()

    def _take(self) -> DecodeWorker:
        with self._lock:
            if self._closed:
                raise NotReady("this replica is shutting down: try another one")
            self._counters["decoded_in_worker"] += 1
            while self._idle:
                worker = self._idle.pop()
                if worker.alive:
                    break
                worker.end()
                self._counters["decode_workers_lost"] += 1
            else:
                worker = DecodeWorker(*self._settings)
            self._busy.add(worker)
            return worker

    def _give_back(self, worker: DecodeWorker) -> None:
        alive = worker.alive
        with self._lock:
            self._busy.discard(worker)
            if not alive:
                self._counters["decode_workers_lost"] += 1
            if not self._closed:
                fresh = alive and worker.pictures < MAX_PICTURES
                self._idle.append(worker if fresh else DecodeWorker(*self._settings))
                if fresh:
                    return
        worker.end()
