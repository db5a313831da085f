"""The OpenVINO runner: on the CPU a graph is the tower compiled by OpenVINO.

The tower is traced once, through the same dispatcher as eager, and kept on disk for the next start. It is compiled
once, for any batch and text length: measured on ViT-B/32 this costs nothing over a model for each bucket (CPU
milliseconds an image within 2 % at batch 1 to 32), while each model more holds all weights once more.

Lanes are the exception that is worth it. A forward on all threads meets at the end of each operator, so whatever else
takes one core for a moment stops the others too: 0.3 cores of other work cost it 29 % of its rate on two cores, where
one forward per thread, side by side, lost 15 %. A lone item still has all threads, by a model of its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import numpy as np
import torch

from encoder.attention.dispatch import CallTrace
from encoder.device import Device
from encoder.graphs import conversion
from encoder.graphs.conversion import PRECISIONS
from encoder.graphs.ir_store import WEIGHTS
from encoder.graphs.patch_product import patches_as_product
from encoder.graphs.pooled_token import Split, split_at_pooled_token
from encoder.graphs.runner import Bucket, GraphRunner
from encoder.memory import drop_mapped_pages
from encoder.models.tower import Inputs, TowerOutput


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
            # By itself it ties its threads to the first processors: those of all replicas of a node to the same ones.
            "ENABLE_CPU_PINNING": False,
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

        converted = conversion.tower_as_model(self, openvino.Core(), inputs)
        self._trace, self._file = converted.trace, converted.file
        model = converted.model
        model.reshape({
            port: [-1, *(-1 if size == bucket.length else size for size in tensor.shape[1:])]
            for port, tensor in zip(model.inputs, inputs.values(), strict=True)
        })  # fmt: skip
        patches_as_product(model)
        return split_at_pooled_token(model, handed_on=PRECISIONS[self.dtype])


def _infer(request: Any, inputs: Sequence[Any]) -> None:
    """On a thread of OpenVINO's own: it ties a lane to the thread that calls, and with more callers than lanes, as the
    start's proof makes them, two of these would end up on one processor."""
    request.start_async(inputs, share_inputs=True)
    request.wait()
