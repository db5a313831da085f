"""The eager runner: calls the module as it is. It serves any size, and is what graphs are held against."""

import torch

from encoder.attention.dispatch import CallTrace
from encoder.attention.hf import attending
from encoder.device import Device
from encoder.graphs.runner import Bucket, GraphRunner
from encoder.models.tower import Inputs, TowerOutput


class EagerRunner(GraphRunner):
    """No graph: every forward is dispatched operator by operator."""

    name = "eager"
    packed = True

    @classmethod
    def unavailable(cls, device: Device) -> str | None:
        return None

    def capture(self, bucket: Bucket, inputs: Inputs) -> int:
        self.run(bucket, inputs)
        return 0

    def run(self, bucket: Bucket, inputs: Inputs, *, tokens: bool = False) -> tuple[TowerOutput, CallTrace]:
        with torch.inference_mode(), attending(self.dispatcher, self.eager_segments(inputs)) as trace:
            output = self.forward(self.to_device(inputs))
        features = output.tokens.float().cpu() if tokens and output.tokens is not None else None
        return TowerOutput(output.vectors.float().cpu(), features), trace

    def release(self, bucket: Bucket) -> None:
        """Nothing is held."""
