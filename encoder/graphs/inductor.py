"""torch.compile of the tower, as an option: `runner: inductor` on a CPU, `cuda-inductor` before CUDA graphs.

Attention stays what the dispatcher decides: each call of it ends one compiled part, and the next begins. It takes a C++
compiler or Triton, and tens of seconds at start; a bucket that does not come out quicker than eager is served eager.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from encoder.attention.dispatch import CallTrace
from encoder.attention.hf import attending
from encoder.device import Device
from encoder.graphs.cuda import CudaGraphRunner
from encoder.graphs.runner import Bucket, GraphRunner
from encoder.models.tower import Inputs, TowerOutput

# Compiled versions of one piece of code, one a bucket. Past torch's own limit of eight it would go on eager in silence.
VERSIONS = 256


class CompiledTower(GraphRunner):
    """Computes with the tower as torch compiles it for each shape that it meets."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._compiled = torch.compile(self.tower.forward, dynamic=False)

    def compute(self, inputs: Inputs) -> TowerOutput:
        output: TowerOutput = self._compiled(dict(inputs))
        return output


class InductorRunner(CompiledTower):
    """Compiled for each bucket's shape; what is called with another one is an error."""

    name = "inductor"

    @classmethod
    def unavailable(cls, device: Device) -> str | None:
        if device.kind == "cpu":
            return None
        return f"it compiles for the CPU, not for {device.kind}{': use cuda-inductor' * (device.kind == 'cuda')}"

    def capture(self, bucket: Bucket, inputs: Inputs) -> int:
        with many_versions():
            self._forward(inputs)
        return 0

    def run(self, bucket: Bucket, inputs: Inputs, *, tokens: bool = False) -> tuple[TowerOutput, CallTrace]:
        with torch.compiler.set_stance("fail_on_recompile"):
            output, trace = self._forward(inputs)
        features = output.tokens.float() if tokens and output.tokens is not None else None
        return TowerOutput(output.vectors.float(), features), trace

    def release(self, bucket: Bucket) -> None:
        """Compiled code stays with its process."""

    def _forward(self, inputs: Inputs) -> tuple[TowerOutput, CallTrace]:
        with torch.inference_mode(), attending(self.dispatcher) as trace:
            return self.forward(inputs), trace


class CompiledCudaGraphRunner(CompiledTower, CudaGraphRunner):
    """As CUDA graphs, of a compiled tower: the warm-up compiles it, the capture records what came out."""

    name = "cuda-inductor"
    packed = False

    def capture(self, bucket: Bucket, inputs: Inputs) -> int:
        with many_versions():
            return super().capture(bucket, inputs)


@contextmanager
def many_versions() -> Iterator[None]:
    """Inside, a version is compiled for each shape, and one too many is an error."""
    import torch._dynamo

    with torch._dynamo.config.patch(
        recompile_limit=VERSIONS, accumulated_recompile_limit=VERSIONS * 16, fail_on_recompile_limit_hit=True
    ):
        yield
