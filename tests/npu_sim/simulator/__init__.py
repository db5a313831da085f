"""The simulator inside its process: start it once, then use ``torch`` and ``torch_npu`` as on a real machine.

Import this only in a process that the launcher prepared (see ``tests/npu_sim/launch.py``).
"""

from __future__ import annotations

import atexit
import functools
from collections.abc import Iterator
from contextlib import contextmanager

from ..settings import Misbehaviour, initial_misbehaviour
from .calls import CallLog, FusedCall, SdpaCall
from .execution import Executor
from .fused_attention import FusedAttention
from .recording import Recorder
from .registration import register
from .runtime import Counter, Runtime

__all__ = ["CallLog", "Counter", "FusedCall", "Misbehaviour", "SdpaCall", "Simulator", "start"]


class Simulator:
    """Handles of the running simulator: the call log, the switches for faults and the limits."""

    def __init__(self) -> None:
        self.runtime = Runtime()
        self.calls = CallLog()
        recorder = Recorder()
        executor = Executor(self.runtime, recorder)
        self._attention = FusedAttention(executor, self.calls, self.runtime.device_name(), initial_misbehaviour())
        self._libraries = register(executor, self.calls, self._attention.kernels())
        atexit.register(self.runtime.connect(recorder.replay, recorder.drop, recorder.capture_ended))

    @contextmanager
    def misbehaving(self, fault: Misbehaviour | None) -> Iterator[None]:
        """The fused operator is wrong in this way inside the block; replays of captured calls are as well."""
        before, self._attention.fault = self._attention.fault, fault
        try:
            yield
        finally:
            self._attention.fault = before

    @contextmanager
    def memory_headroom(self, free_bytes: int, device: int = 0) -> Iterator[None]:
        """The device has only ``free_bytes`` beyond what it has handed out already, inside the block."""
        before = self.runtime.memory_limit(device)
        self.runtime.set_memory_limit(device, self.runtime.used_memory(device) + free_bytes)
        try:
            yield
        finally:
            self.runtime.set_memory_limit(device, before)

    @contextmanager
    def stream_headroom(self, free_streams: int, device: int = 0) -> Iterator[None]:
        """Only ``free_streams`` more streams can be created on the device, inside the block."""
        before = self.runtime.stream_limit()
        self.runtime.set_stream_limit(self.runtime.live_streams(device) + free_streams)
        try:
            yield
        finally:
            self.runtime.set_stream_limit(before)


@functools.cache
def start() -> Simulator:
    """Starts the simulator in this process; a second call returns the same one."""
    return Simulator()
