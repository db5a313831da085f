"""The OpenVINO runner: on the CPU a graph is the tower compiled for one bucket.

The tower is traced once, through the same dispatcher as eager, and compiled with fixed shapes for each bucket.
"""

import warnings
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from encoder.attention.dispatch import CallTrace
from encoder.attention.hf import attending
from encoder.device import Device
from encoder.graphs.runner import Bucket, GraphRunner
from encoder.models.tower import Inputs, TowerOutput

PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}


class OpenVinoRunner(GraphRunner):
    """Compiled models per bucket; threads as many as torch's, so that a replica keeps to its CPU claim."""

    name = "openvino"

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._traced: Any = None
        self._trace = CallTrace()
        self._requests: dict[Bucket, Any] = {}

    @classmethod
    def unavailable(cls, device: Device) -> str | None:
        if device.kind != "cpu":
            return f"it compiles for the CPU, not for {device.kind}"
        try:
            import openvino  # noqa: F401
        except ImportError:
            return "openvino is not installed: pip install 'vitfleet[openvino]'"
        return None

    def capture(self, bucket: Bucket, inputs: Inputs) -> int:
        import openvino

        if self._traced is None:
            # Tracing runs the tower several times, and two items tell it as much as many.
            self._traced = self._convert({name: tensor[:2] for name, tensor in inputs.items()})
        model = self._traced.clone()
        model.reshape({port: list(tensor.shape) for port, tensor in zip(model.inputs, inputs.values(), strict=True)})
        settings = {
            "INFERENCE_PRECISION_HINT": PRECISIONS[self.dtype],
            "PERFORMANCE_HINT": "LATENCY",
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        self._requests[bucket] = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
        return 0

    def run(self, bucket: Bucket, inputs: Inputs, *, tokens: bool = False) -> tuple[TowerOutput, CallTrace]:
        request = self._requests[bucket]
        # float32 goes in whatever the precision inside: rounding is the compiled model's, at its first operator.
        found = request.infer([tensor.numpy() for tensor in inputs.values()])
        self.dispatcher.count(self._trace)
        wanted = list(found.values())[: 2 if tokens else 1]
        copies = [torch.from_numpy(np.array(one, dtype=np.float32)) for one in wanted]  # the request keeps its buffers
        return TowerOutput(*copies), self._trace

    def release(self, bucket: Bucket) -> None:
        """Frees the compiled model."""
        self._requests.pop(bucket, None)

    def _convert(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        """The tower as an OpenVINO model with open shapes; it holds float32 weights of its own."""
        import openvino

        names = list(inputs)
        tower = self.tower
        was = next(tower.module.parameters()).dtype

        class Traced(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.module = tower.module

            def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
                output = tower.forward(dict(zip(names, tensors, strict=True)))
                return tuple(part for part in output if part is not None)

        try:
            tower.module.float()
            with torch.no_grad(), attending(self.dispatcher) as trace, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # tracing warns of every Python branch on a shape
                traced = openvino.convert_model(Traced().eval(), example_input=tuple(inputs.values()))
        finally:
            tower.module.to(was)
        self._trace = trace
        return traced
