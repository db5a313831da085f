"""What CUDA and NPU graphs share: static buffers that live with the graph, warm-up, capture, copy-in, clone-out."""

from abc import abstractmethod
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch

from encoder.attention.backend import Segments
from encoder.attention.dispatch import CallTrace
from encoder.attention.hf import attending
from encoder.graphs.runner import BOUNDARIES, Bucket, GraphRunner
from encoder.models.tower import Inputs

# The first calls of a shape make library handles and workspaces, which a capture must not.
WARM_UPS = 2


@dataclass(frozen=True)
class Captured:
    """A graph with all that it reads and writes; nothing of it may be freed while the graph lives."""

    graph: Any
    inputs: dict[str, torch.Tensor]
    segments: Segments | None
    output: torch.Tensor
    trace: CallTrace


class CapturingRunner(GraphRunner):
    """Captures a forward per bucket into one shared memory pool and replays it on fixed addresses."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._captured: dict[Bucket, Captured] = {}
        self._pool: Any = None

    @property
    @abstractmethod
    def accelerator(self) -> Any:
        """torch.cuda or torch.npu."""

    @abstractmethod
    def new_graph(self) -> Any:
        """An empty graph object of the device."""

    @abstractmethod
    def capturing(self, graph: Any, pool: Any, segments: Segments | None) -> AbstractContextManager[Any]:
        """Inside, what runs is recorded into `graph`, its memory taken from `pool`."""

    @abstractmethod
    def capture_segments(self, bucket: Bucket, inputs: Inputs, static: Inputs) -> Segments | None:
        """Boundaries as the captured calls read them, over static buffers; None for fixed-size batches."""

    @abstractmethod
    def update(self, captured: Captured, inputs: Inputs) -> None:
        """Gives a captured graph what it reads on the host, before a replay."""

    def capture(self, bucket: Bucket, inputs: Inputs) -> int:
        # Buffers are made outside inference mode, so that copies into them are allowed for the life of the graph.
        static = {name: tensor.clone() for name, tensor in self.to_device(inputs).items()}
        segments = self.capture_segments(bucket, inputs, static)
        with torch.inference_mode():
            for _ in range(WARM_UPS):
                with attending(self.dispatcher, segments):
                    self.tower.forward(static)
            self.accelerator.synchronize()
            before = self.accelerator.memory_reserved()
            graph = self.new_graph()
            if self._pool is None:
                self._pool = self.accelerator.graph_pool_handle()
            with attending(self.dispatcher, segments) as trace, self.capturing(graph, self._pool, segments):
                output = self.tower.forward(static)
            self.accelerator.synchronize()
        self._captured[bucket] = Captured(graph, static, segments, output, trace)
        return max(0, int(self.accelerator.memory_reserved() - before))

    def run(self, bucket: Bucket, inputs: Inputs) -> tuple[torch.Tensor, CallTrace]:
        captured = self._captured[bucket]
        with torch.inference_mode():
            for name, buffer in captured.inputs.items():
                buffer.copy_(inputs[name], non_blocking=True)
            self.update(captured, inputs)
            captured.graph.replay()
            # A copy: the next replay writes the same buffer.
            vectors = captured.output.clone().float().cpu()
        self.dispatcher.count(captured.trace)
        return vectors, captured.trace

    def release(self, bucket: Bucket) -> None:
        """Frees the graph and its buffers."""
        self.accelerator.synchronize()
        self._captured.pop(bucket, None)


def host_boundaries(inputs: Inputs) -> tuple[int, ...] | None:
    """Cumulative lengths of a packed batch as they came from the host, or None for a fixed-size batch."""
    boundaries = inputs.get(BOUNDARIES)
    return None if boundaries is None else tuple(boundaries.tolist())
