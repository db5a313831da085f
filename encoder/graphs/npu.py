"""NPU graphs. The fused operator reads its lengths on the host, so they are handed over anew before every replay.

A captured call with lengths waits for an event that only `update()` records: a replay without it would hang
(torch_npu 2.13, `NPUGraph`). Calls without lengths, as for pictures of one size, are captured plainly.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from encoder.attention.backend import Segments
from encoder.attention.dispatch import SegmentsByName
from encoder.device import Device
from encoder.graphs.captured import Captured, CapturingRunner, host_boundaries, longest_segments
from encoder.graphs.runner import Bucket
from encoder.models.tower import Inputs


class NpuGraphRunner(CapturingRunner):
    """One graph a bucket; each takes streams of the device, of which there are about 2048."""

    name = "npu"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._update_stream: Any = None

    @classmethod
    def unavailable(cls, device: Device) -> str | None:
        if device.kind != "npu":
            return f"it needs an Ascend NPU, this is {device.kind}"
        import torch_npu

        return None if hasattr(torch_npu.npu, "NPUGraph") else "this torch_npu has no NPUGraph"

    @property
    def accelerator(self) -> Any:
        return torch.npu  # type: ignore[attr-defined]

    def new_graph(self) -> Any:
        graph = self.accelerator.NPUGraph()
        if self._update_stream is None:
            self._update_stream = self.accelerator.Stream(device=self.device.index)
        # torch_npu makes one update stream for the process, on the device that had the first graph.
        graph.graph_dispatch_mode.update_stream = self._update_stream
        return graph

    @contextmanager
    def capturing(self, graph: Any, pool: Any, stream: Any, segments: SegmentsByName) -> Iterator[None]:
        try:
            with self.accelerator.graph(
                graph,
                pool=pool,
                stream=stream,
                auto_dispatch_capture=bool(segments),
                capture_error_mode="thread_local",
            ):
                yield
        finally:
            # torch_npu 2.13 leaves its mode active when the end of a capture raises.
            mode = graph.graph_dispatch_mode
            if any(active is mode for active in _get_current_dispatch_mode_stack()):
                mode.__exit__(None, None, None)

    def capture_segments(self, bucket: Bucket, inputs: Inputs, static: Inputs) -> SegmentsByName:
        host, longest = host_boundaries(inputs), longest_segments(bucket, inputs)
        return {
            name: Segments(static[name], host[name], length, replayed=True, name=name)
            for name, length in longest.items()
        }

    def update(self, captured: Captured, inputs: Inputs) -> None:
        ends = {name: list(boundaries[1:]) for name, boundaries in host_boundaries(inputs).items()}
        if not ends:
            return
        # One entry a captured call with lengths, in their order; those of windows have other ends than those of items.
        given = [
            {"actual_seq_lengths": ends[name], "actual_seq_lengths_kv": ends[name]}
            for name in captured.trace.host_lengths
        ]
        captured.graph.update(cpu_update_input=given)
