"""Small towers and graph runners that are right, or wrong in one way; what is proved here needs no device."""

from collections import Counter, defaultdict
from collections.abc import Sequence
from threading import Lock
from typing import Any

import numpy as np
import torch

from encoder.attention.backend import MaskNeed
from encoder.attention.dispatch import CallTrace, Dispatcher
from encoder.attention.hf import attending
from encoder.attention.resolve import ResolvedBackend
from encoder.attention.sdpa import SdpaAttention
from encoder.device import Device
from encoder.graphs.eager import EagerRunner
from encoder.graphs.runner import Bucket, GraphRunner
from encoder.models.tower import Inputs, Tower, TowerOutput, TowerSpec
from tests.support.packed_tower import PackedTower, sharp_vit

CPU = Device("cpu", 0, "a test's cpu", "x86_64", 1 << 30)


class Pictures(Tower[np.ndarray]):
    """Items are float32 [6]; a vector is a fixed function of each."""

    spec = TowerSpec("fake", "vision", 5, frozenset({64}), frozenset({MaskNeed.NONE}), token_dimensions=3)

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = [torch.randn(6, 9, generator=generator), torch.randn(9, 5, generator=generator)]

    def collate(self, items: Sequence[np.ndarray], *, length: int | None = None) -> dict[str, torch.Tensor]:
        assert length is None
        return {"pixels": torch.from_numpy(np.stack(list(items)))}

    def forward(self, inputs: Inputs) -> TowerOutput:
        hidden = torch.tanh(inputs["pixels"] @ self.weights[0])
        return TowerOutput(hidden @ self.weights[1], hidden.unflatten(1, (3, 3)))

    def grid_of(self, item: np.ndarray) -> tuple[int, ...]:
        return (3, 1)

    def golden_items(self) -> list[np.ndarray]:
        return list(np.random.default_rng(1).standard_normal((4, 6)).astype(np.float32))

    def describe_preprocessing(self) -> dict[str, Any]:
        return {}


class Texts(Tower[list[int]]):
    """Items are lists of ids; a vector is the mean of the ids that the mask lets through, so that padding must not
    count: collate fills it with an id that would be seen."""

    spec = TowerSpec("fake", "text", 5, frozenset({64}), frozenset({MaskNeed.KEY_PADDING}), max_tokens=16)

    def __init__(self) -> None:
        self.table = torch.randn(50, 5, generator=torch.Generator().manual_seed(2))

    def length_of(self, item: list[int]) -> int:
        return len(item)

    def collate(self, items: Sequence[list[int]], *, length: int | None = None) -> dict[str, torch.Tensor]:
        width = length or max(map(len, items))
        ids = torch.full((len(items), width), 49)
        for row, item in enumerate(items):
            ids[row, : len(item)] = torch.tensor(item)
        seen = torch.arange(width)[None] < torch.tensor([len(item) for item in items])[:, None]
        return {"ids": ids, "mask": seen}

    def forward(self, inputs: Inputs) -> TowerOutput:
        seen = inputs["mask"][..., None].float()
        return TowerOutput((self.table[inputs["ids"]] * seen).sum(1) / seen.sum(1))

    def golden_items(self) -> list[list[int]]:
        rng = np.random.default_rng(3)
        return [rng.integers(0, 49, size=length).tolist() for length in (3, 5, 12, 2)]

    def describe_preprocessing(self) -> dict[str, Any]:
        return {}


def packed_tower() -> PackedTower:
    return PackedTower(sharp_vit(head_dim=8, max_tokens=16), head_dim=8, max_tokens=16)


class Recorded(GraphRunner):
    """As a captured graph works: buffers that live with the bucket, copied into, replayed, copied out of."""

    name = "recorded"
    packed = True

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.static: dict[Bucket, dict[str, torch.Tensor]] = {}
        self.out: dict[Bucket, list[torch.Tensor]] = {}
        self.runs: Counter[Bucket] = Counter()
        self.captured: list[Bucket] = []
        self.released: list[Bucket] = []
        self.locks: defaultdict[Bucket, Lock] = defaultdict(Lock)  # a bucket's buffers are there once for all lanes

    @classmethod
    def unavailable(cls, device: Device) -> str | None:
        return None

    def capture(self, bucket: Bucket, inputs: Inputs) -> int:
        self.captured.append(bucket)
        self.static[bucket] = {name: tensor.clone() for name, tensor in inputs.items()}
        self.out[bucket] = self.forward(bucket)
        return 1 << 20

    def run(self, bucket: Bucket, inputs: Inputs, *, tokens: bool = False) -> tuple[TowerOutput, CallTrace]:
        with self.locks[bucket]:
            self.runs[bucket] += 1
            self.copy_in(bucket, inputs)
            for buffer, computed in zip(self.out[bucket], self.forward(bucket), strict=True):
                buffer.copy_(computed)
            handed = [self.hand_out(bucket, buffer) for buffer in self.out[bucket]]
        return TowerOutput(*handed[: 2 if tokens else 1]), CallTrace()

    def release(self, bucket: Bucket) -> None:
        self.released.append(bucket)
        self.static.pop(bucket, None)
        self.out.pop(bucket, None)

    def forward(self, bucket: Bucket) -> list[torch.Tensor]:
        static = self.static[bucket]
        with torch.no_grad(), attending(self.dispatcher, self.eager_segments(static)):
            return [part.clone() for part in self.tower.forward(static) if part is not None]

    def copy_in(self, bucket: Bucket, inputs: Inputs) -> None:
        for name, buffer in self.static[bucket].items():
            buffer.copy_(inputs[name])

    def hand_out(self, bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.clone()


class HandsOutItsBuffer(Recorded):
    def hand_out(self, bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
        return buffer


class HandsOutItsVectors(Recorded):
    """The features are copies, the vectors are not."""

    def hand_out(self, bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
        return buffer if buffer is self.out[bucket][0] else buffer.clone()


class HandsOutItsFeatures(Recorded):
    """The vectors are copies, the features are not."""

    def hand_out(self, bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.clone() if buffer is self.out[bucket][0] else buffer


class WrongFeatures(Recorded):
    def hand_out(self, bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.clone() if buffer is self.out[bucket][0] else buffer.roll(1, dims=1)


class GivesNoFeatures(Recorded):
    def run(self, bucket: Bucket, inputs: Inputs, *, tokens: bool = False) -> tuple[TowerOutput, CallTrace]:
        return super().run(bucket, inputs)


class RoundsApart(Recorded):
    """Its numbers are eager's, moved by more than graphs may differ: in the first component."""

    by: tuple[float, ...] = (0.01, 0, 0, 0, 0)

    def hand_out(self, bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
        return buffer + torch.tensor(self.by[: buffer.shape[-1]])


class RoundsOneComponent(RoundsApart):
    """By too little for the cosine to tell."""

    by = (3e-4, 0, 0, 0, 0)


class RoundsApartEverywhere(RoundsApart):
    """As far in its worst component, but in all of them."""

    by = (0.02, -0.01, 0.01, -0.01, 0.01)


class IgnoresInputs(Recorded):
    def copy_in(self, bucket: Bucket, inputs: Inputs) -> None:
        """Answers for what it was captured with, for ever."""


class ForgetsOneInput(Recorded):
    """The mask of a text, the boundaries of a packed batch."""

    def copy_in(self, bucket: Bucket, inputs: Inputs) -> None:
        for name, buffer in self.static[bucket].items():
            if name not in ("mask", "cu_seqlens"):
                buffer.copy_(inputs[name])


class SeesNoMask(Recorded):
    """What a text is padded with counts as well."""

    def copy_in(self, bucket: Bucket, inputs: Inputs) -> None:
        super().copy_in(bucket, inputs)
        self.static[bucket]["mask"].fill_(True)


class LetsItemsSeeEachOther(Recorded):
    """A row is moved by the mean of its batch."""

    def hand_out(self, bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
        return buffer + 0.01 * buffer.mean(0)


class WrongAtFour(Recorded):
    def hand_out(self, bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.flip(-1) if bucket.batch == 4 else buffer.clone()


class WrongTheSecondTime(Recorded):
    def hand_out(self, bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.flip(-1) if self.runs[bucket] == 2 else buffer.clone()


class LosesItsWorkSpace(Recorded):
    """A larger bucket's replay writes where a smaller one keeps what it computed once."""

    def run(self, bucket: Bucket, inputs: Inputs, *, tokens: bool = False) -> tuple[TowerOutput, CallTrace]:
        spoilt = any(self.runs[other] and other.cost > bucket.cost for other in self.static)
        output, trace = super().run(bucket, inputs, tokens=tokens)
        return (output._replace(vectors=output.vectors.flip(-1)) if spoilt else output), trace


class ShiftsRows(Recorded):
    def hand_out(self, bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
        return buffer.roll(1, dims=0)


class GivesNan(Recorded):
    def hand_out(self, bucket: Bucket, buffer: torch.Tensor) -> torch.Tensor:
        return torch.full_like(buffer, float("nan"))


class FailsAtReplay(Recorded):
    def copy_in(self, bucket: Bucket, inputs: Inputs) -> None:
        raise RuntimeError("update() must come before each replay\nand more lines")


class FailsAtCapture(Recorded):
    """At the bucket of three items or more."""

    def capture(self, bucket: Bucket, inputs: Inputs) -> int:
        if bucket.batch >= 3:
            raise torch.OutOfMemoryError("NPU out of memory. Tried to allocate 2 GiB\nand more lines")
        return super().capture(bucket, inputs)


class TakesNoPacked(Recorded):
    packed = False


class SmallEager(EagerRunner):
    """Without memory for more than two items."""

    most = 2

    def run(self, bucket: Bucket, inputs: Inputs, *, tokens: bool = False) -> tuple[TowerOutput, CallTrace]:
        if len(next(iter(inputs.values()))) > self.most:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return super().run(bucket, inputs, tokens=tokens)


class NoEager(SmallEager):
    """Without memory for anything."""

    most = 0


def runners(
    tower: Tower[Any], kind: type[GraphRunner], eager: type[EagerRunner] = EagerRunner
) -> tuple[GraphRunner, EagerRunner]:
    """A runner of that kind and an eager one, on the CPU in float32 through SDPA."""
    decided = ResolvedBackend("sdpa", "platform", "a test", SdpaAttention.capabilities)
    dispatcher = Dispatcher(decided)
    return kind(tower, dispatcher, CPU, torch.float32), eager(tower, dispatcher, CPU, torch.float32)
