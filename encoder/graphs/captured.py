"""What CUDA and NPU graphs share: static buffers that live with the graph, warm-up, capture, copy-in, copy-out.

A batch crosses to the device on a stream of its own, into memory beside the graph's, while the batch before it is
computed; what is left for the replay's own stream is a copy within the device.
"""

from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from queue import SimpleQueue
from threading import Lock
from typing import Any

import torch

from encoder.attention.backend import dtype_name
from encoder.attention.dispatch import CallTrace, SegmentsByName
from encoder.attention.hf import attending
from encoder.graphs.runner import BOUNDARIES, WINDOWS, Bucket, GraphRunner
from encoder.models.tower import Inputs, TowerOutput

# The first calls of a shape make library handles and workspaces, which a capture must not.
WARM_UPS = 2
# Batches of a bucket that are under way at once: one is computed, the next is handed over.
UNDER_WAY = 2


@dataclass(frozen=True)
class Place:
    """Where a batch is until its replay: on the host, from where the device reads it, and on the device, beside the
    graph's own inputs, which the replay before may still read."""

    staging: dict[str, torch.Tensor]
    landing: dict[str, torch.Tensor]


@dataclass(frozen=True)
class Captured:
    """A graph with all that it reads and writes; nothing of it may be freed while the graph lives.

    `places`: those that are free; a batch has one until its vectors are on the host.
    """

    graph: Any
    inputs: dict[str, torch.Tensor]
    places: "SimpleQueue[Place]"
    segments: SegmentsByName
    output: TowerOutput
    trace: CallTrace


class CapturingRunner(GraphRunner):
    """Captures a forward per bucket into one shared memory pool and replays it on fixed addresses."""

    packed = True
    takes_ahead = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._captured: dict[Bucket, Captured] = {}
        self._pool: Any = None
        self._stream: Any = None
        self._copies: Any = None
        self._one_replay = Lock()

    @property
    @abstractmethod
    def accelerator(self) -> Any:
        """torch.cuda or torch.npu."""

    @abstractmethod
    def new_graph(self) -> Any:
        """An empty graph object of the device."""

    @abstractmethod
    def capturing(self, graph: Any, pool: Any, stream: Any, segments: SegmentsByName) -> AbstractContextManager[Any]:
        """Inside, what runs is recorded into `graph` on `stream`, its memory taken from `pool`."""

    @abstractmethod
    def capture_segments(self, bucket: Bucket, inputs: Inputs, static: Inputs) -> SegmentsByName:
        """Boundaries by name as the captured calls read them, over static buffers; none for fixed-size batches."""

    @abstractmethod
    def update(self, captured: Captured, inputs: Inputs) -> None:
        """Gives a captured graph what it reads on the host, before a replay."""

    def staging_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        """Host memory of a tensor's shape and dtype from which the device is fed; pinned where a runner can have it."""
        return torch.empty_like(tensor)

    def capture(self, bucket: Bucket, inputs: Inputs) -> int:
        index = self.device.index
        with self.accelerator.device(index):
            # Only without cached blocks does the reserved memory tell what a graph holds.
            self.accelerator.empty_cache()
            before = self.accelerator.memory_reserved(index)
            current = self.accelerator.current_stream(index)
            try:
                self._captured[bucket] = self._capture(bucket, inputs)
            except Exception:
                # torch and torch_npu leave the capture stream current when the end of a capture raises, and the
                # allocator may think that the pool is still being captured into.
                self.accelerator.set_stream(current)
                self._pool = None
                raise
            self.accelerator.synchronize()
            self.accelerator.empty_cache()
            return max(0, int(self.accelerator.memory_reserved(index) - before))

    def run(self, bucket: Bucket, inputs: Inputs, *, tokens: bool = False) -> tuple[TowerOutput, CallTrace]:
        captured = self._captured[bucket]
        given, wanted = kinds_of(inputs), kinds_of(captured.inputs)
        if given != wanted:  # a copy would broadcast, and round, in silence
            raise ValueError(f"bucket {bucket} was captured with inputs {wanted} and is given {given}")
        with self.accelerator.device(self.device.index), torch.inference_mode():
            place = captured.places.get()
            try:
                handed_over = self._hand_over(place, inputs)
                with self._one_replay:
                    output = self._replay(captured, place, handed_over, inputs, tokens)
            finally:
                captured.places.put(place)
        self.dispatcher.count(captured.trace)
        return output, captured.trace

    def _hand_over(self, place: Place, inputs: Inputs) -> Any:
        """Begins to copy a batch to the device; gives the event of its arrival there."""
        with self.accelerator.stream(self._copies):
            for name, buffer in place.landing.items():
                # By way of memory that the device reads by itself. It was read before the vectors of its last run came.
                buffer.copy_(place.staging[name].copy_(inputs[name]), non_blocking=True)
            return self._copies.record_event()

    def _replay(self, captured: Captured, place: Place, handed_over: Any, inputs: Inputs, tokens: bool) -> TowerOutput:
        self.accelerator.current_stream(self.device.index).wait_event(handed_over)
        for name, buffer in captured.inputs.items():
            buffer.copy_(place.landing[name])
        self.update(captured, inputs)
        captured.graph.replay()
        return TowerOutput(
            _to_host(captured.output.vectors),
            _to_host(captured.output.tokens) if tokens and captured.output.tokens is not None else None,
        )

    def release(self, bucket: Bucket) -> None:
        """Frees the graph and its buffers."""
        if self._captured.pop(bucket, None) is None:
            return
        if not self._captured:
            self._pool = None  # a pool without graphs is freed, and cannot be used again
        with self.accelerator.device(self.device.index):
            self.accelerator.synchronize()
            self.accelerator.empty_cache()

    def _capture(self, bucket: Bucket, inputs: Inputs) -> Captured:
        if self._stream is None:
            self._stream = self.accelerator.Stream(device=self.device.index)
            self._copies = self.accelerator.Stream(device=self.device.index)
        if self._pool is None:
            self._pool = self.accelerator.graph_pool_handle()
        # Buffers are made outside inference mode, so that copies into them are allowed for the life of the graph.
        static = {name: tensor.clone() for name, tensor in self.to_device(inputs).items()}
        places: SimpleQueue[Place] = SimpleQueue()
        for _ in range(UNDER_WAY):
            staging = {name: self.staging_buffer(tensor) for name, tensor in inputs.items()}
            places.put(Place(staging, {name: torch.empty_like(buffer) for name, buffer in static.items()}))
        segments = self.capture_segments(bucket, inputs, static)
        failed: Exception | None = None
        with torch.inference_mode():
            self._stream.wait_stream(self.accelerator.current_stream(self.device.index))
            with self.accelerator.stream(self._stream):
                for _ in range(WARM_UPS):
                    with attending(self.dispatcher, segments):
                        self.forward(static)
            self.accelerator.synchronize()
            graph = self.new_graph()
            try:
                with (
                    attending(self.dispatcher, segments) as trace,
                    self.capturing(graph, self._pool, self._stream, segments),
                ):
                    try:
                        output = self.forward(static)
                    except Exception as error:
                        failed = error
                        raise
            except Exception as error:
                try:
                    # The end of a spoilt capture raises as well; what spoilt it is what helps.
                    raise failed or error from None
                finally:
                    failed = None  # else it would keep this frame, and so the buffers, alive
        return Captured(graph, static, places, segments, output, trace)


def kinds_of(inputs: Inputs) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Dtype and shape of each."""
    return {name: (dtype_name(tensor.dtype), tuple(tensor.shape)) for name, tensor in inputs.items()}


def _to_host(buffer: torch.Tensor) -> torch.Tensor:
    """A copy in any case: the next replay writes the same buffer."""
    return buffer.to("cpu", torch.float32, copy=True)


def longest_segments(bucket: Bucket, inputs: Inputs) -> dict[str, int]:
    """The boundaries that a batch has, and the greatest length that a bucket allows between them."""
    bounds = {BOUNDARIES: bucket.max_length, WINDOWS: bucket.max_window}
    return {name: longest for name, longest in bounds.items() if name in inputs}


def host_boundaries(inputs: Inputs) -> dict[str, tuple[int, ...]]:
    """Cumulative lengths of a packed batch by name, as they came from the host; none for a fixed-size batch."""
    return {name: tuple(inputs[name].tolist()) for name in (BOUNDARIES, WINDOWS) if name in inputs}
