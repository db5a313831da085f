"""What CUDA and NPU graphs share: static buffers that live with the graph, warm-up, capture, copy-in, copy-out."""

from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from encoder.attention.backend import dtype_name
from encoder.attention.dispatch import CallTrace, SegmentsByName
from encoder.attention.hf import attending
from encoder.graphs.runner import BOUNDARIES, WINDOWS, Bucket, GraphRunner
from encoder.models.tower import Inputs, TowerOutput

# The first calls of a shape make library handles and workspaces, which a capture must not.
WARM_UPS = 2


@dataclass(frozen=True)
class Captured:
    """A graph with all that it reads and writes; nothing of it may be freed while the graph lives."""

    graph: Any
    inputs: dict[str, torch.Tensor]
    staging: dict[str, torch.Tensor]
    segments: SegmentsByName
    output: TowerOutput
    trace: CallTrace


class CapturingRunner(GraphRunner):
    """Captures a forward per bucket into one shared memory pool and replays it on fixed addresses."""

    packed = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._captured: dict[Bucket, Captured] = {}
        self._pool: Any = None
        self._stream: Any = None

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
            for name, buffer in captured.inputs.items():
                # By way of memory that the device reads by itself. It was read before the last run's vectors came.
                buffer.copy_(captured.staging[name].copy_(inputs[name]), non_blocking=True)
            self.update(captured, inputs)
            captured.graph.replay()
            output = TowerOutput(
                _to_host(captured.output.vectors),
                _to_host(captured.output.tokens) if tokens and captured.output.tokens is not None else None,
            )
        self.dispatcher.count(captured.trace)
        return output, captured.trace

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
        if self._pool is None:
            self._pool = self.accelerator.graph_pool_handle()
        # Buffers are made outside inference mode, so that copies into them are allowed for the life of the graph.
        static = {name: tensor.clone() for name, tensor in self.to_device(inputs).items()}
        staging = {name: self.staging_buffer(tensor) for name, tensor in inputs.items()}
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
        return Captured(graph, static, staging, segments, output, trace)


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
