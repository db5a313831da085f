"""What a family adds to the parity table: how to make its checkpoint, and transformers' own answers for it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np
import torch
from PIL import Image

Mode = Literal["torch", "pil"]
Size = Literal["real", "small"]
Inputs = Mapping[str, torch.Tensor]
RUNNERS = ("eager", "openvino", "npu")
DTYPES = ("float32", "bfloat16")


class Expected(NamedTuple):
    """transformers' answer: vectors float32 [n, D], and patch features float32 [t, F] of each picture, if any."""

    vectors: np.ndarray
    features: list[np.ndarray]


@dataclass(frozen=True)
class Case:
    """One model of one family.

    `write(folder, size)`: saves a checkpoint with seeded weights, of real size or small, and gives the folder.
    `inputs(folder, mode, pictures)`: for each picture what the publisher's processor makes of it, under the names and
    in the shapes of the tower's `collate([item])`.
    `oracle(folder, inputs)`: what transformers' own model, eager and in float32, computes from such inputs.
    `buckets`: of the engine, [images a batch] or what the family's settings take; `modes`: of preprocessing that have
    an oracle. `settings`: engine settings beyond these. `bfloat16_cosine`: what is asked of bfloat16.
    `layers(folder)`: attention calls in one forward. `skip`: runner → why it cannot serve this family.
    """

    name: str
    family: str
    write: Callable[[Path, Size], Path]
    inputs: Callable[[Path, Mode, Sequence[Image.Image]], list[Inputs]]
    oracle: Callable[[Path, Sequence[Inputs]], Expected]
    layers: Callable[[Path], int]
    buckets: tuple[int, ...] = (1, 8)
    modes: tuple[Mode, ...] = ("torch", "pil")
    settings: Mapping[str, object] = field(default_factory=dict)
    skip: Mapping[str, str] = field(default_factory=dict)
    bfloat16_cosine: float = 0.999
