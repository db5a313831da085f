"""Pixels against transformers' default processors, recorded where they run.

data/pixels_golden.npz was made with transformers 5.24, torchvision 0.29.1, torch 2.14.1: five processors, seven sizes.
It keeps digests (sha256/<processor>/<i>) of the uint8 [3, H, W] pixels before rescale and normalise, the processors'
settings (config/<processor>), the sizes, and the three smallest pictures; the others are made by the same formula.
"""

import hashlib
import json
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from encoder.preprocess import transform as transform_module
from encoder.preprocess.transform import ImageTransform

GOLDEN = np.load(Path(__file__).parent / "data" / "pixels_golden.npz")
PROCESSORS = ("clip224", "clip336", "siglip224", "dinov2", "vit224")
PICTURES = range(7)


def _digest(pixels: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(pixels).tobytes()).hexdigest()


@cache
def _pictures() -> list[np.ndarray]:
    rng = np.random.default_rng(7)
    made = []
    for index in PICTURES:
        height, width = GOLDEN[f"size/{index}"].tolist()
        blobs = Image.fromarray(rng.integers(0, 255, (9, 12, 3), dtype=np.uint8))
        smooth = np.asarray(blobs.resize((width, height), Image.Resampling.BICUBIC)).astype(int)
        picture = np.clip(smooth + rng.normal(0, 6, (height, width, 3)), 0, 255).astype(np.uint8)
        made.append(GOLDEN.get(f"image/{index}", picture))
    return made


def _transform(processor: str) -> ImageTransform:
    return ImageTransform.from_config(json.loads(str(GOLDEN[f"config/{processor}"])), "torch")


@pytest.mark.parametrize("index", PICTURES)
@pytest.mark.parametrize("processor", PROCESSORS)
def test_pixels_are_bit_equal(processor: str, index: int) -> None:
    picture = _pictures()[index]
    if _digest(picture) != str(GOLDEN[f"sha256/image/{index}"]):
        pytest.skip("this numpy or Pillow makes another picture of the formula")
    found = _transform(processor).resize_crop(picture)
    assert _digest(found) == str(GOLDEN[f"sha256/{processor}/{index}"])


@pytest.mark.parametrize("processor", PROCESSORS)
def test_pixels_are_bit_equal_however_little_is_made_of_them(monkeypatch: pytest.MonkeyPatch, processor: str) -> None:
    """The same with every crop computed alone, as only very narrow pictures need it."""
    monkeypatch.setattr(transform_module, "LARGE_INTERMEDIATE", 0)
    for index in (3, 5, 6):  # enlarged along at least one side
        found = _transform(processor).resize_crop(_pictures()[index])
        assert _digest(found) == str(GOLDEN[f"sha256/{processor}/{index}"])
