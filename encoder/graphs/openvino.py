"""The OpenVINO runner: on the CPU a graph is the tower compiled by OpenVINO.

The tower is traced once, through the same dispatcher as eager, and kept on disk for the next start. It is compiled
once, for any batch and text length: measured on ViT-B/32 this costs nothing over a model for each bucket (CPU
milliseconds an image within 2 % at batch 1 to 32), while each model more holds all weights once more.

Lanes are the exception that is worth it. A forward on all threads meets at the end of each operator, so whatever else
takes one core for a moment stops the others too: 0.3 cores of other work cost it 29 % of its rate on two cores, where
one forward per thread, side by side, lost 15 %. A lone item still has all threads, by a model of its own.
"""

import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from encoder.attention.dispatch import CallTrace
from encoder.attention.hf import attending
from encoder.device import Device
from encoder.graphs.ir_store import WEIGHTS, IrStore
from encoder.graphs.patch_product import patches_as_product
from encoder.graphs.pooled_token import Split, split_at_pooled_token
from encoder.graphs.runner import Bucket, GraphRunner
from encoder.memory import drop_mapped_pages
from encoder.models.tower import Inputs, TowerOutput

PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
# Part of the key of what is kept: raise it when the way of converting changes.
CONVERSION = "1"


@dataclass(frozen=True)
class Lane:
    """Requests for the vectors and, where those are computed apart, for the features."""

    vectors: Any
    features: Any | None


@dataclass(frozen=True)
class Compiled:
    """A model's lanes, each taken by one forward at a time, and the buckets that run on them."""

    idle: SimpleQueue[Lane]
    buckets: set[Bucket] = field(default_factory=set)

    @contextmanager
    def lane(self) -> Iterator[Lane]:
        """One that nobody else uses meanwhile; waits for it."""
        lane = self.idle.get()
        try:
            yield lane
        finally:
            self.idle.put(lane)


class OpenVinoRunner(GraphRunner):
    """A compiled model for each number of lanes; threads as many as torch's, so that a replica keeps to its claim."""

    name = "openvino"
    has_lanes = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._split: Split | None = None
        self._by_lanes: dict[int, Compiled] = {}
        self._trace = CallTrace()
        self._file: Path | None = None

    @classmethod
    def unavailable(cls, device: Device) -> str | None:
        if device.kind != "cpu":
            return f"it compiles for the CPU, not for {device.kind}"
        try:
            import openvino  # noqa: F401
        except ImportError:
            return "openvino is not installed: pip install 'vitfleet[openvino]'"
        return None

    @property
    def precision(self) -> str:
        return "int8" if self.options.int8 else super().precision

    def capture(self, bucket: Bucket, inputs: Inputs) -> int:
        # What a shape needs beside the model is made by its first run, which its proof is.
        if self._split is None:
            self._split = self._prepared(bucket, self.tower.finish(inputs))
        if bucket.lanes not in self._by_lanes:
            self._by_lanes[bucket.lanes] = self._compile(self._split, bucket.lanes)
        self._by_lanes[bucket.lanes].buckets.add(bucket)
        return 0

    def run(self, bucket: Bucket, inputs: Inputs, *, tokens: bool = False) -> tuple[TowerOutput, CallTrace]:
        # On the host, in float32: bfloat16 inside would round the levels before they are normalised.
        finished = [tensor.numpy() for tensor in self.tower.finish(inputs).values()]
        with self._by_lanes[bucket.lanes].lane() as lane:
            _infer(lane.vectors, finished)
            vectors, *rest = lane.vectors.output_tensors
            if tokens and lane.features is not None:
                _infer(lane.features, rest)
                rest = lane.features.output_tensors
            # Copied: the lane writes its own again.
            wanted = [vectors, *(rest if tokens else ())]
            copies = [torch.from_numpy(np.array(one.data, dtype=np.float32)) for one in wanted]
        self.dispatcher.count(self._trace)
        return TowerOutput(*copies), self._trace

    def release(self, bucket: Bucket) -> None:
        """The model goes with the last of its buckets."""
        compiled = self._by_lanes.get(bucket.lanes)
        if compiled is not None:
            compiled.buckets.discard(bucket)
            if not compiled.buckets:
                del self._by_lanes[bucket.lanes]

    def settle(self) -> None:
        self._split = None
        if self._file is not None:
            drop_mapped_pages(self._file.with_name(WEIGHTS))

    def _compile(self, split: Split, lanes: int) -> Compiled:
        import openvino

        core = openvino.Core()
        settings = {
            "INFERENCE_PRECISION_HINT": PRECISIONS[self.dtype],
            "NUM_STREAMS": lanes,
            "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        }
        vectors, features = (
            core.compile_model(part, "CPU", settings) if part is not None else None
            for part in (split.vectors, split.features)
        )
        compiled = Compiled(SimpleQueue())
        for _ in range(lanes):
            requests = (part.create_infer_request() if part is not None else None for part in (vectors, features))
            compiled.idle.put(Lane(*requests))
        return compiled

    def _prepared(self, bucket: Bucket, inputs: Inputs) -> Split:
        """The tower for any batch and length, in the form that is compiled."""
        import openvino

        core = openvino.Core()
        model = self._model(core, inputs)
        model.reshape({
            port: [-1, *(-1 if size == bucket.length else size for size in tensor.shape[1:])]
            for port, tensor in zip(model.inputs, inputs.values(), strict=True)
        })  # fmt: skip
        patches_as_product(model)
        return split_at_pooled_token(model, handed_on=PRECISIONS[self.dtype])

    def _model(self, core: Any, inputs: Inputs) -> Any:
        """The tower as OpenVINO's model: from the store where it is kept there, else converted and kept."""
        import openvino

        if self.options.cache is None or not self.options.identity:
            return self._convert(inputs)
        store = IrStore(self.options.cache / "openvino")
        key = (*self.options.identity, *self._versions(), self.dispatcher.resolved.name, *self._numbers())
        kept = store.find(key)
        if kept is not None:
            self._file, self._trace = kept
            return core.read_model(self._file)
        model = self._convert(inputs)
        try:
            self._file = store.keep(
                key, lambda path: openvino.save_model(model, path, compress_to_fp16=False), self._trace
            )
        except OSError as error:
            self.notes.append(f"the converted model is not kept for the next start: {error}")
            return model
        return core.read_model(self._file)

    def _versions(self) -> tuple[str, ...]:
        import openvino
        import transformers

        return (f"conversion {CONVERSION}", openvino.get_version(), torch.__version__, transformers.__version__)

    def _numbers(self) -> tuple[str, str]:
        """The weights that are converted have been rounded to the dtype already."""
        return PRECISIONS[self.dtype], f"int8 {self.options.int8.digest}" if self.options.int8 else "as trained"

    def _convert(self, inputs: Mapping[str, torch.Tensor]) -> Any:
        """The tower as an OpenVINO model with open shapes; it holds float32 weights of its own, or int8 ones."""
        import openvino

        # Tracing runs the tower several times, and two items tell it as much as many.
        few = {name: tensor[:2] for name, tensor in inputs.items()}
        tower = self.tower
        was = next(tower.module.parameters()).dtype

        class Traced(torch.nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.module = tower.module

            def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
                output = tower.forward(dict(zip(few, tensors, strict=True)))
                return tuple(part for part in output if part is not None)

        try:
            tower.module.float()
            with torch.no_grad(), attending(self.dispatcher) as trace, warnings.catch_warnings():
                warnings.simplefilter("ignore")  # tracing warns of every Python branch on a shape
                model = openvino.convert_model(Traced().eval(), example_input=tuple(few.values()))
        finally:
            tower.module.to(was)
        self._trace = trace
        if self.options.int8 is None:
            return model
        from encoder.graphs.int8 import quantised

        return quantised(model, self.tower, self.options.int8)


def _infer(request: Any, inputs: Sequence[Any]) -> None:
    """On a thread of OpenVINO's own: it ties a lane to the thread that calls, and with more callers than lanes, as the
    start's proof makes them, two of these would end up on one processor."""
    request.start_async(inputs, share_inputs=True)
    request.wait()
