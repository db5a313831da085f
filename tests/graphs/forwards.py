"""Forwards over the small towers, prepared, and what is expected of them."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from encoder.graphs.answers import Rows
from encoder.graphs.bucketed import BucketedForward
from encoder.graphs.eager import EagerRunner
from encoder.graphs.packing import packed_buckets
from encoder.graphs.runner import Bucket, GraphLimits, GraphRunner
from encoder.models.tower import Inputs, Tower
from tests.graphs.fakes import Pictures, Recorded, Texts, runners

PICTURES = [Bucket(1), Bucket(2), Bucket(4)]
TEXTS = [Bucket(batch, length) for batch in (1, 2, 4) for length in (4, 8, 16)]
PACKED = packed_buckets(16, [1, 3])  # 4, 8, 16 and 48 tokens; the golden items are of 7, 12, 3 and 16


def forward_of(
    tower: Tower[Any],
    buckets: Sequence[Bucket],
    kind: type[GraphRunner] = Recorded,
    eager: type[EagerRunner] = EagerRunner,
    limits: GraphLimits | None = None,
    truth: Rows | None = None,
) -> BucketedForward:
    made = BucketedForward(*runners(tower, kind, eager), buckets, limits)
    made.prepare(tower.golden_items(), lambda message: None, truth)
    return made


def states(forward: BucketedForward) -> dict[str, str]:
    return {str(record.bucket): record.state for record in forward.records}


def reasons(forward: BucketedForward) -> set[str]:
    return {record.reason for record in forward.records}


def pictures_of(count: int, seed: int = 7) -> list[np.ndarray]:
    return list(np.random.default_rng(seed).standard_normal((count, 6)).astype(np.float32))


def expected_pictures(tower: Pictures, items: Sequence[np.ndarray]) -> np.ndarray:
    first, second = (weight.double().numpy() for weight in tower.weights)
    return np.tanh(np.stack(list(items)).astype(np.float64) @ first) @ second


def expected_texts(tower: Texts, items: Sequence[list[int]]) -> np.ndarray:
    return np.stack([tower.table[torch.tensor(item)].double().mean(0).numpy() for item in items])


class Watched(Recorded):
    """Notes what each replay was given."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.given: list[tuple[Bucket, dict[str, tuple[int, ...]]]] = []

    def copy_in(self, bucket: Bucket, inputs: Inputs) -> None:
        self.given.append((bucket, {name: tuple(tensor.shape) for name, tensor in inputs.items()}))
        super().copy_in(bucket, inputs)


def watched(tower: Tower[Any], buckets: Sequence[Bucket]) -> tuple[BucketedForward, Watched]:
    runner, eager = runners(tower, Watched)
    assert isinstance(runner, Watched)
    forward = BucketedForward(runner, eager, buckets)
    forward.prepare(tower.golden_items(), lambda message: None)
    runner.given.clear()
    return forward, runner
