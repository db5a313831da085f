"""What a graph runner is: it makes a forward ready for one bucket, and runs it."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch

from encoder.attention.backend import ITEM_BOUNDARIES, WINDOW_BOUNDARIES, Segments, dtype_name
from encoder.attention.dispatch import CallTrace, Dispatcher, SegmentsByName
from encoder.device import Device
from encoder.models.tower import Inputs, Tower, TowerOutput

GraphState = Literal["ready", "eager", "disabled"]
# Keys of a packed batch's boundaries among its inputs, int32 on the host: of items [segments + 1], and, for towers with
# windows, of those [windows + 1].
BOUNDARIES = ITEM_BOUNDARIES
WINDOWS = WINDOW_BOUNDARIES


@dataclass(frozen=True, order=True)
class Bucket:
    """A captured size.

    Fixed-size: `batch` items, texts padded to `length` tokens (0: no length, as for pictures). Packed: `tokens` in
    all, in up to `segments` pieces, none longer than `max_length`, padding included; at most `batch` of them are items.
    Where layers attend by windows, there are up to `windows` of them, none longer than `max_window`.
    `lanes`: how many of these run side by side, each on its share of the device; 1: it has all of it.
    """

    batch: int
    length: int = 0
    tokens: int = 0
    segments: int = 0
    max_length: int = 0
    windows: int = 0
    max_window: int = 0
    lanes: int = 1

    @property
    def packed(self) -> bool:
        """Whether this is a token budget."""
        return self.tokens > 0

    @property
    def cost(self) -> int:
        """What running it costs, in tokens or items: the smaller of two that fit is the better."""
        return self.tokens or self.batch * max(self.length, 1)

    def __str__(self) -> str:
        if self.packed:
            windows = f",windows={self.windows},max_window={self.max_window}" if self.windows else ""
            return f"tokens={self.tokens},segments={self.segments},max_length={self.max_length}{windows}"
        length = f",length={self.length}" if self.length else ""
        return f"batch={self.batch}{length}" + (f",lanes={self.lanes}" if self.lanes > 1 else "")


@dataclass(frozen=True)
class GraphRecord:
    """What is known of one bucket; times in milliseconds, memory in bytes.

    `eager_ms` is 0 where eager was not timed: it could not have been the quicker one. `serves`: whether batches of this
    size can be run at all, by the graph or eager. `worst_cosine`, `max_abs_error`: of all its replays at start, held
    against eager on vectors of length 1; None before there was one.
    """

    runner: str
    bucket: Bucket
    backend: str
    dtype: str
    state: GraphState = "ready"
    reason: str = ""
    capture_ms: float = 0.0
    memory_bytes: int = 0
    replay_ms: float = 0.0
    eager_ms: float = 0.0
    serves: bool = True
    worst_cosine: float | None = None
    max_abs_error: float | None = None

    @property
    def device_ms(self) -> float:
        """What a replay takes of the whole device: those of all lanes run side by side."""
        return self.replay_ms / self.bucket.lanes


@dataclass(frozen=True)
class GraphLimits:
    """How many graphs are captured at most, and how much device memory they may hold together, in bytes; None: all."""

    max_graphs: int = 64
    memory_bytes: int | None = None


@dataclass(frozen=True)
class Calibration:
    """Prepared items that quantisation looks at; `digest` names them. `items` is called only when they are needed."""

    digest: str
    items: Callable[[], Sequence[Any]]


@dataclass(frozen=True)
class RunnerOptions:
    """What a runner may use besides tower, backend and device.

    `identity` names the tower's weights and code, so that what was made of them can be kept in `cache` for the next
    start; without either nothing is kept. `int8`: quantise with these items.
    """

    identity: tuple[str, ...] = ()
    cache: Path | None = None
    int8: Calibration | None = None


NO_OPTIONS = RunnerOptions()


class GraphRunner(ABC):
    """Owns the forwards of one tower on one device.

    Called from one thread, or one for each of a bucket's lanes, or from two where it takes batches ahead.
    """

    name: ClassVar[str]
    # Whether it can run several batches side by side, each on a share of the device.
    has_lanes: ClassVar[bool] = False
    # Whether a batch can be given to it while the one before is computed, and is copied to the device meanwhile.
    takes_ahead: ClassVar[bool] = False
    # Whether it serves packed batches, whose boundaries change from run to run.
    packed: ClassVar[bool] = False

    def __init__(
        self,
        tower: Tower[Any],
        dispatcher: Dispatcher,
        device: Device,
        dtype: torch.dtype,
        options: RunnerOptions = NO_OPTIONS,
    ) -> None:
        self.tower = tower
        self.dispatcher = dispatcher
        self.device = device
        self.dtype = dtype
        self.options = options
        self.notes: list[str] = []

    @property
    def precision(self) -> str:
        """What is computed in, as reports and thresholds name it: float32, bfloat16, float16, int8."""
        return dtype_name(self.dtype)

    @classmethod
    @abstractmethod
    def unavailable(cls, device: Device) -> str | None:
        """Why this runner cannot run on `device`, or None when it can."""

    @abstractmethod
    def capture(self, bucket: Bucket, inputs: Inputs) -> int:
        """Makes the bucket ready with host inputs of exactly its size; returns the bytes it holds, 0 when unknown."""

    @abstractmethod
    def run(self, bucket: Bucket, inputs: Inputs, *, tokens: bool = False) -> tuple[TowerOutput, CallTrace]:
        """Vectors float32 on the host, owned by the caller, and what the attention calls did.

        A row for each of the bucket's items, or, packed, for each of its segments. Features, float32 as
        well, only where `tokens` asks for them.
        """

    @abstractmethod
    def release(self, bucket: Bucket) -> None:
        """Gives back what a bucket holds; it will not be run again."""

    def settle(self) -> None:  # noqa: B027 - most have nothing to let go of
        """Called once all buckets are proven: lets go of what only the start needed."""

    def eager_segments(self, inputs: Inputs) -> SegmentsByName:
        """Boundaries of a packed batch for an eager forward, by name: exact on the host and on the device."""
        return {
            name: Segments.from_lengths(inputs[name].diff().tolist(), self.device.torch_name, name)
            for name in (BOUNDARIES, WINDOWS)
            if name in inputs
        }

    def forward(self, inputs: Inputs) -> TowerOutput:
        """The tower on inputs that are on the device: what is left of preprocessing, then floats in the dtype."""
        finished = self.tower.finish(inputs)
        return self.compute(
            {name: tensor.to(self.dtype) if tensor.is_floating_point() else tensor for name, tensor in finished.items()}
        )

    def compute(self, inputs: Inputs) -> TowerOutput:
        """The tower itself, on inputs that it can take."""
        return self.tower.forward(inputs)

    def to_device(self, inputs: Inputs) -> dict[str, torch.Tensor]:
        """Host inputs on the device, as they are."""
        return {name: tensor.to(self.device.torch_name) for name, tensor in inputs.items()}
