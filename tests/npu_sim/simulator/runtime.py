"""The Python side of the simulated runtime: the C library's ``sim_`` functions with their types."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from enum import IntEnum

KERNEL_FAILED = 1


class StreamMode(IntEnum):
    """What happens to work that is launched on a stream; the values are the C side's."""

    RUN = 0
    CAPTURE = 1
    UPDATE = 2


class Counter(IntEnum):
    """Events that the runtime counts since the process began; the values are the C side's."""

    CAPTURES = 0
    REPLAYS = 1
    UPDATES = 2
    GRAPHS_ALIVE = 3


_RUN = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int64)
_DROP = ctypes.CFUNCTYPE(None, ctypes.c_int64)
_ENDED = ctypes.CFUNCTYPE(None, ctypes.c_uint64)


class Runtime:
    """The C library that this process loaded in place of CANN's (found through LD_LIBRARY_PATH)."""

    def __init__(self) -> None:
        self._c = ctypes.CDLL("libascendcl.so")
        declare = {
            "sim_stream_mode": (ctypes.c_int32, [ctypes.c_void_p]),
            "sim_captured_graph": (ctypes.c_uint64, [ctypes.c_void_p]),
            "sim_add_kernel": (ctypes.c_int, [ctypes.c_void_p, ctypes.c_int64]),
            "sim_counter": (ctypes.c_int64, [ctypes.c_int32]),
            "sim_used_memory": (ctypes.c_uint64, [ctypes.c_int32]),
            "sim_memory_limit": (ctypes.c_uint64, [ctypes.c_int32]),
            "sim_set_memory_limit": (None, [ctypes.c_int32, ctypes.c_uint64]),
            "sim_live_streams": (ctypes.c_int32, [ctypes.c_int32]),
            "sim_stream_limit": (ctypes.c_int32, []),
            "sim_set_stream_limit": (None, [ctypes.c_int32]),
            "sim_set_error": (None, [ctypes.c_char_p]),
            "aclGetRecentErrMsg": (ctypes.c_char_p, []),
            "aclrtGetSocName": (ctypes.c_char_p, []),
            "aclrtSynchronizeStream": (ctypes.c_int, [ctypes.c_void_p]),
        }
        for name, (result, arguments) in declare.items():
            function = getattr(self._c, name)
            function.restype, function.argtypes = result, arguments

    def connect(
        self, run: Callable[[int], None], drop: Callable[[int], None], ended: Callable[[int], None]
    ) -> Callable[[], None]:
        """Has replays call ``run(kernel)``, destroyed graphs ``drop(kernel)`` and ended captures ``ended(graph)``.

        An exception in ``run`` becomes the text of the error that the replay raises. Returns a function that
        disconnects; call it before the interpreter goes away.
        """

        def guarded(kernel: int) -> int:
            try:
                run(kernel)
            except Exception as problem:
                self._c.sim_set_error(f"{type(problem).__name__}: {problem}".encode())
                return KERNEL_FAILED
            return 0

        callbacks = (_RUN(guarded), _DROP(drop), _ENDED(ended))
        self._callbacks = callbacks  # the C side keeps bare pointers
        self._c.sim_set_callbacks(*callbacks)
        return lambda: self._c.sim_set_callbacks(None, None, None)

    def stream_mode(self, stream: int) -> StreamMode:
        return StreamMode(self._c.sim_stream_mode(stream))

    def captured_graph(self, stream: int) -> int:
        """The id of the graph that records ``stream``, 0 when none does."""
        return int(self._c.sim_captured_graph(stream))

    def add_kernel(self, stream: int, kernel: int) -> None:
        """Records ``kernel`` in the stream's capture, or puts it in the place of the updated one."""
        self._check(self._c.sim_add_kernel(stream, kernel))

    def synchronise(self, stream: int) -> None:
        """What every call does that must wait for the device; an error while a graph is captured."""
        self._check(self._c.aclrtSynchronizeStream(stream))

    def _check(self, code: int) -> None:
        if code != 0:
            raise RuntimeError(f"error code is {code}: {self._c.aclGetRecentErrMsg().decode()}")

    def counter(self, which: Counter) -> int:
        return int(self._c.sim_counter(which))

    def device_name(self) -> str:
        return str(self._c.aclrtGetSocName().decode())

    def used_memory(self, device: int) -> int:
        """Bytes that the device has handed out."""
        return int(self._c.sim_used_memory(device))

    def memory_limit(self, device: int) -> int:
        return int(self._c.sim_memory_limit(device))

    def set_memory_limit(self, device: int, limit: int) -> None:
        self._c.sim_set_memory_limit(device, limit)

    def live_streams(self, device: int) -> int:
        """Streams in use on the device, those that graphs hold included."""
        return int(self._c.sim_live_streams(device))

    def stream_limit(self) -> int:
        return int(self._c.sim_stream_limit())

    def set_stream_limit(self, limit: int) -> None:
        self._c.sim_set_stream_limit(limit)
