"""CUDA graphs. Boundaries are read from the device, so one graph serves every layout that fits its bucket."""

from contextlib import AbstractContextManager
from typing import Any

import torch

from encoder.attention.backend import Segments
from encoder.attention.dispatch import SegmentsByName
from encoder.device import Device
from encoder.graphs.captured import Captured, CapturingRunner, longest_segments
from encoder.graphs.runner import Bucket
from encoder.models.tower import Inputs


class CudaGraphRunner(CapturingRunner):
    """`max_length` and scale are baked in: the bucket's greatest length stands for every batch in it."""

    name = "cuda"

    @classmethod
    def unavailable(cls, device: Device) -> str | None:
        return None if device.kind in ("cuda", "rocm") else f"it needs a CUDA device, this is {device.kind}"

    @property
    def accelerator(self) -> Any:
        return torch.cuda

    def new_graph(self) -> Any:
        return self.accelerator.CUDAGraph()

    def capturing(self, graph: Any, pool: Any, stream: Any, segments: SegmentsByName) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = self.accelerator.graph(
            graph, pool=pool, stream=stream, capture_error_mode="thread_local"
        )
        return context

    def staging_buffer(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.empty_like(tensor, pin_memory=True)

    def capture_segments(self, bucket: Bucket, inputs: Inputs, static: Inputs) -> SegmentsByName:
        longest = longest_segments(bucket, inputs)
        return {name: Segments(static[name], None, length, name=name) for name, length in longest.items()}

    def update(self, captured: Captured, inputs: Inputs) -> None:
        """Nothing is read on the host."""
