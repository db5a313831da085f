"""A device in the place of torch.cuda: it records the operators of a capture and replays them on fixed tensors.

As on a GPU a graph knows addresses: inputs are read where they were, outputs are written where they were, whatever was
read on the host is baked in, and waiting for the device spoils a capture. As with torch, the end of a spoilt capture
raises and leaves its stream current. A copy that does not block, on a stream of its own, takes as long as it may: it is
done when another stream waits for its event, and no sooner.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

WAITS = {"aten::_local_scalar_dense", "aten::nonzero", "aten::item"}


class Event:
    """How far a stream had to come."""

    def __init__(self, stream: "Stream", todo: int) -> None:
        self.stream, self.todo = stream, todo


class Stream:
    """Copies that were asked for; everything else runs at once."""

    def __init__(self) -> None:
        self.copies: list[Callable[[], object]] = []
        self.done = 0
        self._lock = threading.Lock()

    def wait_stream(self, other: "Stream") -> None:
        """It has run already."""

    def record_event(self) -> Event:
        return Event(self, len(self.copies))

    def wait_event(self, event: Event) -> None:
        with event.stream._lock:
            while event.stream.done < event.todo:
                event.stream.copies[event.stream.done]()
                event.stream.done += 1


class PutOff(TorchDispatchMode):
    """Copies that do not block are the stream's to do."""

    def __init__(self, stream: Stream) -> None:
        super().__init__()
        self.copied_on = stream

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.name() == "aten::copy_" and args[2:] == (True,):
            place, source = args[:2]
            self.copied_on.copies.append(lambda: place.copy_(source))
            return place
        return func(*args, **(kwargs or {}))


class Graph(TorchDispatchMode):
    """Operators with the tensors that they read and the tensors that took their results."""

    def __init__(self) -> None:
        super().__init__()
        self.recorded: list[tuple[Any, Any, Any, Any]] = []
        self.spoilt = False
        self.replays = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func.name() in WAITS:
            self.spoilt = True
            raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nand more lines")
        result = func(*args, **kwargs)
        self.recorded.append((func, args, kwargs, result))
        return result

    def replay(self) -> None:
        self.replays += 1
        with torch.inference_mode():
            for func, args, kwargs, result in self.recorded:
                again = func(*args, **kwargs)
                for place, value in zip(tree_leaves(result), tree_leaves(again), strict=True):
                    if isinstance(place, torch.Tensor) and place.data_ptr() != value.data_ptr():
                        place.copy_(value)


class RecordingDevice:
    """What a runner asks of torch.cuda. `reserved`: bytes that `memory_reserved` tells, raised by each capture."""

    CUDAGraph = Graph

    def __init__(self, bytes_per_graph: int = 1 << 20) -> None:
        self.default = Stream()
        self._thread = threading.local()
        self.pools: list[Any] = []
        self.used_pools: list[Any] = []
        self.reserved = 0
        self.bytes_per_graph = bytes_per_graph

    @property
    def current(self) -> Stream:
        return getattr(self._thread, "current", self.default)

    def device(self, index: int) -> AbstractContextManager[None]:
        return nullcontext()

    def Stream(self, device: int) -> Stream:
        return Stream()

    def current_stream(self, device: int | None = None) -> Stream:
        return self.current

    def set_stream(self, stream: Stream) -> None:
        self._thread.current = stream

    @contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before = self.current
        self.set_stream(stream)
        try:
            with PutOff(stream):
                yield
        finally:
            self.set_stream(before)

    def graph_pool_handle(self) -> object:
        self.pools.append(object())
        return self.pools[-1]

    def memory_reserved(self, device: int) -> int:
        return self.reserved

    def synchronize(self) -> None:
        """It has run already."""

    def empty_cache(self) -> None:
        """Nothing is cached."""

    @contextmanager
    def graph(self, graph: Graph, *, pool: object, stream: Stream, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local" and pool is self.pools[-1]
        self.used_pools.append(pool)
        before = self.current
        self.set_stream(stream)
        try:
            with graph:
                yield
        finally:
            if graph.spoilt:
                raise RuntimeError("CUDA error: capture was invalidated")
            self.set_stream(before)
        self.reserved += self.bytes_per_graph
