"""Both modes against transformers' processors, live: pixels and normalised numbers, every size and setting."""

import os
import subprocess
import sys
import warnings
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.bit.image_processing_bit import BitImageProcessor
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_clip import CLIPImageProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip.image_processing_siglip import SiglipImageProcessor
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from transformers.models.vit.image_processing_vit import ViTImageProcessor

from encoder.errors import InvalidImage
from encoder.preprocess import transform as transform_module
from encoder.preprocess.transform import ImageTransform, Mode
from tests.preprocess.torchvision_stand_in import torchvision_stand_in

CLASSES = {
    ("CLIP", "torch"): CLIPImageProcessor,
    ("CLIP", "pil"): CLIPImageProcessorPil,
    ("Siglip", "torch"): SiglipImageProcessor,
    ("Siglip", "pil"): SiglipImageProcessorPil,
    ("ViT", "torch"): ViTImageProcessor,
    ("ViT", "pil"): ViTImageProcessorPil,
    ("Bit", "torch"): BitImageProcessor,
    ("Bit", "pil"): BitImageProcessorPil,
}
MODES: tuple[Mode, ...] = ("torch", "pil")
SIZES = [(480, 640), (641, 427), (227, 225), (224, 224), (224, 300), (100, 130), (231, 600), (33, 95), (1, 1), (1, 50)]


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def oracle(family: str, mode: Mode, config: dict[str, Any], pixels: np.ndarray, **overrides: Any) -> np.ndarray:
    """What transformers makes of the pixels, [3, H, W]."""
    image = Image.fromarray(pixels)
    if mode == "pil":
        return np.asarray(CLASSES[family, mode](**config)(image, **overrides).pixel_values[0])
    with torchvision_stand_in():
        return CLASSES[family, mode](**config)(image, return_tensors="pt", **overrides).pixel_values[0].numpy()


def check(family: str, mode: Mode, config: dict[str, Any], pixels: np.ndarray) -> None:
    transform = ImageTransform.from_config({"image_processor_type": f"{family}ImageProcessor", **config}, mode)
    found = transform.resize_crop(pixels)
    expected = oracle(family, mode, config, pixels, do_rescale=False, do_normalize=False)
    assert found.dtype == np.uint8 and found.flags.c_contiguous
    assert found.shape == (3, *transform.output_size)
    assert np.array_equal(found, expected)
    numbers = transform.normalize(found[None])
    assert numbers.dtype == np.float32 and numbers.shape == (1, *found.shape) and numbers.flags.c_contiguous
    assert np.array_equal(numbers[0], oracle(family, mode, config, pixels))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("family", ["CLIP", "Siglip", "ViT", "Bit"])
@pytest.mark.parametrize("size", SIZES)
def test_class_defaults(family: str, mode: Mode, size: tuple[int, int]) -> None:
    check(family, mode, {}, picture(*size))


CONFIGS: list[tuple[str, dict[str, Any]]] = [
    ("CLIP", {"size": 336, "crop_size": 336}),
    ("CLIP", {"size": 224, "crop_size": 224, "resample": 2}),
    ("CLIP", {"size": 60, "crop_size": {"height": 64, "width": 50}}),
    ("CLIP", {"size": 60, "crop_size": 61}),
    ("CLIP", {"size": [50, 40], "do_center_crop": False}),
    ("CLIP", {"size": {"shortest_edge": 64, "longest_edge": 96}, "crop_size": 64}),
    ("CLIP", {"size": {"max_height": 70, "max_width": 50}, "crop_size": 64}),
    ("CLIP", {"do_resize": False, "crop_size": 64}),
    ("CLIP", {"do_rescale": False}),
    ("CLIP", {"do_normalize": False}),
    ("CLIP", {"do_rescale": False, "do_normalize": False}),
    ("CLIP", {"rescale_factor": 1 / 127.5, "image_mean": [1.0, 1.0, 1.0], "image_std": [1.0, 1.0, 1.0]}),
    ("CLIP", {"rescale_factor": 0.00392156862745098}),
    ("ViT", {"size": 50}),
    ("ViT", {"size": 50, "do_center_crop": True, "crop_size": 40}),
    ("Siglip", {"size": 50, "do_center_crop": True, "crop_size": 50}),
    ("Siglip", {"size": {"height": 384, "width": 300}, "image_mean": 0.5, "image_std": 0.25}),
    ("Bit", {"size": {"shortest_edge": 256}, "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}),
]


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("family", "config"), CONFIGS)
def test_settings(family: str, config: dict[str, Any], mode: Mode) -> None:
    if isinstance(config.get("image_mean"), float) and mode == "torch":
        config = {**config, "image_mean": [0.5] * 3, "image_std": [0.25] * 3}  # transformers' fusing takes lists alone
    for size in [(90, 121), (121, 90), (37, 64), (300, 63), (61, 61)]:
        check(family, mode, config, picture(*size))


def test_lanczos() -> None:
    for size in [(90, 121), (300, 63)]:
        check("CLIP", "pil", {"resample": 1}, picture(*size))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    height=st.integers(1, 700),
    width=st.integers(1, 700),
    edge=st.integers(2, 260),
    crop=st.integers(2, 260),
    resample=st.sampled_from([2, 3]),
    mode=st.sampled_from(MODES),
)
def test_any_size(height: int, width: int, edge: int, crop: int, resample: int, mode: Mode) -> None:
    check("CLIP", mode, {"size": edge, "crop_size": crop, "resample": resample}, picture(height, width))


@settings(max_examples=60, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    short=st.integers(1, 40),
    ratio=st.integers(1, 60),
    tall=st.booleans(),
    resample=st.sampled_from([1, 2, 3]),
    crop=st.integers(2, 120),
    mode=st.sampled_from(MODES),
)
def test_a_crop_computed_alone_equals_the_whole(
    short: int, ratio: int, tall: bool, resample: int, crop: int, mode: Mode
) -> None:
    if resample == 1:
        mode = "pil"
    size = (short * ratio, short) if tall else (short, short * ratio)
    config = {"image_processor_type": "CLIP", "size": 100, "crop_size": crop, "resample": resample}
    transform = ImageTransform.from_config(config, mode)
    with pytest.MonkeyPatch.context() as patch:
        whole = transform.resize_crop(picture(*size))
        patch.setattr(transform_module, "LARGE_INTERMEDIATE", 0)
        assert np.array_equal(transform.resize_crop(picture(*size)), whole)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("size", [(1, 2000), (2000, 1), (3, 2000)])
def test_narrow_pictures_equal_the_oracle(mode: Mode, size: tuple[int, int]) -> None:
    config = {"size": 64, "crop_size": 64}
    assert 64 * 64 * 2000 // min(size) > transform_module.LARGE_INTERMEDIATE or size[0] == 3
    check("CLIP", mode, config, picture(*size))


@pytest.mark.parametrize("mode", MODES)
def test_the_narrowest_pictures_are_made_without_their_whole(monkeypatch: pytest.MonkeyPatch, mode: Mode) -> None:
    """1x32768 resized to 224 would have 1.6 thousand million pixels."""
    transform = ImageTransform.from_config({"image_processor_type": "CLIP"}, mode)
    largest = 0
    real = ImageTransform.resized

    def measured(self: ImageTransform, pixels: np.ndarray, height: int, width: int) -> np.ndarray:
        nonlocal largest
        largest = max(largest, height * width)
        return real(self, pixels, height, width)

    monkeypatch.setattr(ImageTransform, "resized", measured)
    for size in [(1, 32_768), (32_768, 1)]:
        assert transform.resize_crop(np.full((*size, 3), 77, dtype=np.uint8)).tobytes() == bytes([77]) * 3 * 224 * 224
    assert 0 < largest <= 32_768 * 224


def test_a_side_that_shrinks_to_nothing_is_refused() -> None:
    config = {"image_processor_type": "CLIP", "size": {"max_height": 50, "max_width": 50}, "crop_size": 50}
    transform = ImageTransform.from_config(config, "torch")
    with pytest.raises(InvalidImage, match="1x2000: too narrow"):
        transform.resize_crop(picture(2000, 1))


@pytest.mark.parametrize("mode", MODES)
def test_normalising_a_batch_equals_one_by_one(mode: Mode) -> None:
    transform = ImageTransform.from_config({"image_processor_type": "CLIP"}, mode)
    batch = np.random.default_rng(0).integers(0, 256, (5, 3, 224, 224), dtype=np.uint8)
    before = batch.copy()
    together = transform.normalize(batch)
    assert np.array_equal(together, np.concatenate([transform.normalize(one[None]) for one in batch]))
    assert np.array_equal(batch, before)


def test_all_256_levels_are_normalised_as_torch_does() -> None:
    """The fused formula written with torch alone."""
    levels = torch.arange(256, dtype=torch.uint8).expand(1, 3, 1, 256)
    mean, std, factor = [0.48145466, 0.4578275, 0.40821073], [0.26862954, 0.26130258, 0.27577711], 1 / 255
    shift, scale = (torch.tensor(values)[:, None, None] * (1.0 / factor) for values in (mean, std))
    expected = levels.to(torch.float32).sub(shift).div(scale)
    found = ImageTransform.from_config({"image_processor_type": "CLIP"}, "torch").normalize(levels.numpy())
    assert np.array_equal(found, expected.numpy())


def test_the_modes_differ_by_a_level_at_most_and_say_who_they_are() -> None:
    pixels = np.asarray(Image.fromarray(picture(9, 12)).resize((640, 480), Image.Resampling.BICUBIC))
    made = [ImageTransform.from_config({"image_processor_type": "CLIP"}, mode) for mode in MODES]
    one, other = (transform.resize_crop(pixels).astype(int) for transform in made)
    assert np.abs(one - other).max() <= 1
    assert made[0].describe() != made[1].describe()


def test_read_only_pixels_are_taken_without_a_warning() -> None:
    pixels = picture(60, 70)
    transform = ImageTransform.from_config({"image_processor_type": "CLIP"}, "torch")
    expected = transform.resize_crop(pixels)
    pixels.flags.writeable = False
    torch.set_warn_always(True)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert np.array_equal(transform.resize_crop(pixels), expected)
    finally:
        torch.set_warn_always(False)


def test_processors_without_vector_instructions_make_the_same_pixels() -> None:
    """torch's kernel for a bare CPU against the one in use here."""
    code = """
import hashlib, numpy as np
from encoder.preprocess.transform import ImageTransform
digest = hashlib.sha256()
for resample in (2, 3):
    transform = ImageTransform.from_config({"image_processor_type": "CLIP", "resample": resample}, "torch")
    for seed in range(12):
        rng = np.random.default_rng(seed)
        size = rng.integers(1, 700, 2)
        digest.update(transform.resize_crop(rng.integers(0, 256, (*size, 3), dtype=np.uint8)).tobytes())
print(digest.hexdigest())
"""
    seen = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, **extra}, capture_output=True, text=True, check=True
        ).stdout
        for extra in ({}, {"ATEN_CPU_CAPABILITY": "default"})
    }
    assert len(seen) == 1
