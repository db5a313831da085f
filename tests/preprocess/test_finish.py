"""What is left of preprocessing for the device gives the same bits as on the host, whichever way it comes."""

import os
import subprocess
import sys

import numpy as np
import pytest
import torch

from encoder.engine import Engine
from encoder.models.halves import PIXELS
from encoder.preprocess.transform import ImageTransform, Mode
from encoder.settings import EngineSettings
from tests.support.checkpoints import PREPROCESSOR

LEVELS = np.random.default_rng(0).integers(0, 256, (3, 3, 224, 224), dtype=np.uint8)


def written_out(transform: ImageTransform, batch: np.ndarray) -> np.ndarray:
    """With numpy, one float32 operation after the other."""
    settings = transform.settings
    mean, std = (np.array(values, np.float32)[:, None, None] for values in (settings.mean, settings.std))
    if transform.mode == "pil":
        scaled = (batch.astype(np.float64) * settings.rescale_factor).astype(np.float32)
        return (scaled - mean) / std
    fused = np.float32(1.0 / settings.rescale_factor)
    return (batch.astype(np.float32) - mean * fused) / (std * fused)


@pytest.mark.parametrize("mode", ["torch", "pil"])
def test_tensors_and_arrays_are_normalised_alike(mode: Mode) -> None:
    transform = ImageTransform.from_config(PREPROCESSOR, mode)
    expected = written_out(transform, LEVELS)
    assert np.array_equal(transform.normalize(LEVELS), expected)
    given = torch.from_numpy(LEVELS)
    assert np.array_equal(transform.normalize_tensor(given).numpy(), expected)
    assert np.array_equal(given.numpy(), LEVELS)  # what came in is left as it was


_COUNT_THREADS = """
import os, sys
import numpy as np, torch
from encoder.preprocess.transform import ImageTransform
from tests.support.checkpoints import PREPROCESSOR
torch.set_num_threads(2)
transform = ImageTransform.from_config(PREPROCESSOR, sys.argv[1])
levels = np.zeros((8, 3, 224, 224), np.uint8)
counted = lambda: len(os.listdir("/proc/self/task"))
before = counted()
transform.normalize(levels)
print(counted() - before, end=" ")
transform.normalize_tensor(torch.from_numpy(levels))
print(counted() - before)
"""


@pytest.mark.parametrize("mode", ["torch", "pil"])
def test_the_host_normalises_in_one_thread(mode: str) -> None:
    """torch's others would spin in the way of a forward on threads that are not torch's."""
    command = [sys.executable, "-c", _COUNT_THREADS, mode]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=True)
    by_numpy, by_torch = map(int, done.stdout.split())
    assert by_numpy == 0
    assert by_torch > 0  # so the count would have shown it


def test_without_a_mean_it_is_scaled_and_floats_are_not_touched() -> None:
    plain = ImageTransform.from_config({**PREPROCESSOR, "do_normalize": False}, "torch")
    assert np.array_equal(plain.normalize(LEVELS), LEVELS.astype(np.float32) * np.float32(1 / 255))
    floats = torch.rand(2, 3, 4, 4)
    kept = floats.clone()
    assert torch.equal(plain.normalize_tensor(floats), kept * np.float32(1 / 255))
    assert np.array_equal(plain.normalize(floats.numpy()), (kept * np.float32(1 / 255)).numpy())
    assert torch.equal(floats, kept)


@pytest.mark.parametrize("mode", ["torch", "pil"])
def test_a_tower_hands_over_levels_that_are_finished_where_they_are(mode: str) -> None:
    engine = Engine.load(EngineSettings.model_validate({"preprocess": mode, "runner": "eager", "buckets": [1]}))
    tower, items = engine._tower, engine._golden
    gathered, whole = tower.gather(items), tower.collate(items)
    assert gathered[PIXELS].dtype is (torch.uint8 if mode == "torch" else torch.float32)
    assert whole[PIXELS].dtype is torch.float32
    for alone in (False, True):
        assert torch.equal(tower.finish(gathered, alone=alone)[PIXELS], whole[PIXELS])
        assert torch.equal(tower.finish(whole, alone=alone)[PIXELS], whole[PIXELS])  # twice is once
