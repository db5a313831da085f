"""The OpenVINO runner: on the CPU a graph is the tower compiled by OpenVINO.

The tower is traced once, through the same dispatcher as eager, and kept on disk for the next start. It is compiled
once, for any batch and text length: measured on ViT-B/32 this costs nothing over a model for each bucket (CPU
milliseconds an image within 2 % at batch 1 to 32), while each model more holds all weights once more.

Lanes are the exception that is worth it. A forward on all threads meets at the end of each operator, so whatever else
takes one core for a moment stops the others too: 0.3 cores of other work cost it 29 % of its rate on two cores, where
one forward per thread, side by side, lost 15 %. A lone item still has all threads, by a model of its own.

So are batches of many rows on a processor with AMX, for which MLPs are cut into slices: see `mlp_slices`.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from queue import SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch

from encoder.attention.dispatch import CallTrace
from encoder.device import Device
from encoder.graphs import conversion
from encoder.graphs.conversion import PRECISIONS, Converted
from encoder.graphs.ir_store import WEIGHTS
from encoder.graphs.mlp_slices import tokens_to_slice
from encoder.graphs.pooled_token import split_at_pooled_token
from encoder.graphs.runner import Bucket, GraphRunner
from encoder.memory import drop_mapped_pages
from encoder.models.tower import Inputs, TowerOutput

# So many rows each of two threads needs for slices of an MLP to gain more than their number costs; a single thread
# gains from 200 on and loses 2 % below. Measured on a hidden layer of 3072.
ROWS_TO_SLICE = 300


class Form(NamedTuple):
    """What sets the models apart: how many lanes, and whether MLPs are in slices."""

    lanes: int
    sliced: bool


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
    """A compiled model for each form that buckets need; threads as many as torch's: a replica keeps to its claim."""

    name = "openvino"
    has_lanes = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        # Whole, and in slices, for as long as there is something to compile.
        self._models: dict[bool, Converted] = {}
        self._tokens_to_slice: int | None = None
        self._threads = torch.get_num_threads()
        self._compiled: dict[Form, Compiled] = {}
        self._trace = CallTrace()

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
        if not self._models:
            self._convert(bucket, self.tower.finish(inputs, alone=True))
        form = self._form(bucket)
        if form not in self._compiled:
            self._compiled[form] = self._compile(form)
        self._compiled[form].buckets.add(bucket)
        return 0

    def run(self, bucket: Bucket, inputs: Inputs, *, tokens: bool = False) -> tuple[TowerOutput, CallTrace]:
        # On the host, in float32: bfloat16 inside would round the levels before they are normalised.
        finished = [tensor.numpy() for tensor in self.tower.finish(inputs, alone=True).values()]
        with self._compiled[self._form(bucket)].lane() as lane:
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
        form = self._form(bucket)
        compiled = self._compiled.get(form)
        if compiled is not None:
            compiled.buckets.discard(bucket)
            if not compiled.buckets:
                del self._compiled[form]

    def settle(self) -> None:
        for converted in self._models.values():
            if converted.file is not None:
                drop_mapped_pages(converted.file.with_name(WEIGHTS))
        self._models.clear()

    def _form(self, bucket: Bucket) -> Form:
        """Lanes have one model, and so has a single thread: what slices cost its small batches is little."""
        tokens = self._tokens_to_slice
        if tokens is None:
            return Form(bucket.lanes, sliced=False)
        rows = bucket.batch * (bucket.length if tokens < 0 else tokens)
        many = rows >= ROWS_TO_SLICE * self._threads
        return Form(bucket.lanes, sliced=many or self._threads == 1 or bucket.lanes > 1)

    def _compile(self, form: Form) -> Compiled:
        import openvino

        core = openvino.Core()
        if form.sliced not in self._models:
            self._models[form.sliced] = conversion.sliced(self, core, self._models[False])
        split = split_at_pooled_token(self._models[form.sliced].model.clone(), handed_on=PRECISIONS[self.dtype])
        settings = {
            "INFERENCE_PRECISION_HINT": PRECISIONS[self.dtype],
            "NUM_STREAMS": form.lanes,
            "INFERENCE_NUM_THREADS": self._threads,
            # By itself it ties its threads to the first processors: those of all replicas of a node to the same ones.
            "ENABLE_CPU_PINNING": False,
        }
        vectors, features = (
            core.compile_model(part, "CPU", settings) if part is not None else None
            for part in (split.vectors, split.features)
        )
        compiled = Compiled(SimpleQueue())
        for _ in range(form.lanes):
            requests = (part.create_infer_request() if part is not None else None for part in (vectors, features))
            compiled.idle.put(Lane(*requests))
        return compiled

    def _convert(self, bucket: Bucket, inputs: Inputs) -> None:
        import openvino

        converted = conversion.tower_as_model(self, openvino.Core(), inputs, bucket.length)
        self._models[False], self._trace = converted, converted.trace
        if self.precision == "bfloat16" and "amx_bf16" in self.device.architecture:
            self._tokens_to_slice = tokens_to_slice(converted.model)


def _infer(request: Any, inputs: Sequence[Any]) -> None:
    """On a thread of OpenVINO's own: it ties a lane to the thread that calls, and with more callers than lanes, as the
    start's proof makes them, two of these would end up on one processor."""
    request.start_async(inputs, share_inputs=True)
    request.wait()
