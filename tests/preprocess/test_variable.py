"""Pictures that keep their proportions: sizes and pixels against transformers' processors, both modes."""

import json
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil, smart_resize
from transformers.models.siglip2.image_processing_pil_siglip2 import (
    Siglip2ImageProcessorPil,
    get_image_size_for_max_num_patches,
)

from encoder.errors import CheckpointError, InvalidImage
from encoder.preprocess.transform import Mode
from encoder.preprocess.variable import PatchBudget, PixelBudget, VariableTransform, naflex_transform, qwen_transform
from tests.preprocess.torchvision_stand_in import torchvision_stand_in

SIDES = st.one_of(st.integers(1, 40), st.integers(1, 5000))
QWEN = {"image_processor_type": "Qwen2VLImageProcessorFast", "min_pixels": 28 * 28 * 4, "max_pixels": 28 * 28 * 30}
NAFLEX = {"image_processor_type": "Siglip2ImageProcessorFast", "max_num_patches": 60}
PICTURES = [(120, 90), (31, 400), (1, 1), (640, 480), (56, 84)]


@settings(max_examples=300, deadline=None)
@given(SIDES, SIDES, st.sampled_from([(3136, 12845056), (65536, 16777216), (3136, 40000), (784, 784), (1, 10**6)]))
def test_qwens_sizes(height: int, width: int, bounds: tuple[int, int]) -> None:
    rule = PixelBudget(14, 2, *bounds)
    try:
        wanted = smart_resize(height, width, factor=28, min_pixels=bounds[0], max_pixels=bounds[1])
    except ValueError:
        with pytest.raises(InvalidImage, match="200 times"):
            rule.target(height, width)
        return
    if min(wanted) == 0:
        with pytest.raises(InvalidImage, match="too narrow"):
            rule.target(height, width)
        return
    assert rule.target(height, width) == wanted
    assert wanted[0] * wanted[1] // 14**2 <= rule.longest


@settings(max_examples=300, deadline=None)
@given(SIDES, SIDES, st.sampled_from([(16, 256), (16, 1024), (14, 5), (8, 1)]))
def test_naflex_sizes(height: int, width: int, budget: tuple[int, int]) -> None:
    patch, most = budget
    rule = PatchBudget(patch, most)
    assert rule.target(height, width) == get_image_size_for_max_num_patches(height, width, patch, most)
    assert np.prod(rule.target(height, width)) // patch**2 <= rule.longest == most


def transform_of(family: str, mode: Mode) -> VariableTransform:
    if family == "qwen":
        return qwen_transform(QWEN, mode, patch=14, merge=2, frames=2, max_patches=None)
    return naflex_transform(NAFLEX, mode, patch=16, max_patches=None)


def oracle(family: str, mode: Mode, pixels: np.ndarray) -> np.ndarray:
    """What transformers makes of the pixels, normalised patches [t, p]."""
    config: dict[str, Any] = {k: v for k, v in (QWEN if family == "qwen" else NAFLEX).items() if "type" not in k}
    image = Image.fromarray(pixels)
    if mode == "pil":
        kind = Qwen2VLImageProcessorPil if family == "qwen" else Siglip2ImageProcessorPil
        found = kind(**config)(image, return_tensors="np")
    else:
        with torchvision_stand_in():
            from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
            from transformers.models.siglip2.image_processing_siglip2 import Siglip2ImageProcessor

            kind = Qwen2VLImageProcessor if family == "qwen" else Siglip2ImageProcessor
            found = kind(**config)(image, return_tensors="np")
    if family == "qwen":
        return np.asarray(found["pixel_values"])
    return np.asarray(found["pixel_values"][0][np.asarray(found["pixel_attention_mask"][0]) == 1])


@pytest.mark.parametrize("size", PICTURES)
@pytest.mark.parametrize("mode", ["torch", "pil"])
@pytest.mark.parametrize("family", ["qwen", "naflex"])
def test_pixels_are_bit_for_bit_those_of_transformers(family: str, mode: Mode, size: tuple[int, int]) -> None:
    pixels = np.random.default_rng(3).integers(0, 256, (*size, 3), dtype=np.uint8)
    transform = transform_of(family, mode)
    item = transform.resize(pixels)
    assert item.dtype == np.uint8 and item.flags.c_contiguous
    numbers = transform.normalize(torch.from_numpy(item)[None])[0].numpy()
    wanted = oracle(family, mode, pixels)
    # The same numbers; in which order patches take them, the towers' own tests tell.
    repeated = np.repeat(numbers[None], 2, axis=0) if family == "qwen" else numbers
    assert repeated.size == wanted.size and np.array_equal(np.sort(repeated.ravel()), np.sort(wanted.ravel()))


def test_what_they_say_of_themselves() -> None:
    for family in ("qwen", "naflex"):
        said = transform_of(family, "torch").describe()
        assert json.loads(json.dumps(said)) == said and said != transform_of(family, "pil").describe()


def test_a_cap_lowers_the_maximum_and_never_raises_it() -> None:
    lower = qwen_transform(QWEN, "torch", patch=14, merge=2, frames=2, max_patches=60)
    assert isinstance(lower.rule, PixelBudget) and lower.rule.max_pixels == 60 * 196
    higher = qwen_transform(QWEN, "torch", patch=14, merge=2, frames=2, max_patches=10**6)
    assert isinstance(higher.rule, PixelBudget) and higher.rule.max_pixels == QWEN["max_pixels"]
    with pytest.raises(CheckpointError, match="give a max_patches of 16 or more"):
        qwen_transform(QWEN, "torch", patch=14, merge=2, frames=2, max_patches=15)
    assert naflex_transform(NAFLEX, "torch", patch=16, max_patches=7).rule.longest == 7
    assert naflex_transform(NAFLEX, "torch", patch=16, max_patches=70).rule.longest == 60


@pytest.mark.parametrize(
    "config",
    [
        {"size": {"shortest_edge": 3136, "longest_edge": 23520}},
        {"size": {"min_pixels": 3136, "max_pixels": 23520}},
        {"min_pixels": 3136, "max_pixels": 23520, "size": {"shortest_edge": 1, "longest_edge": 2}},
    ],
)
def test_all_ways_to_write_qwens_bounds(config: dict[str, Any]) -> None:
    given_ = {"image_processor_type": "Qwen2VLImageProcessor", **config}
    rule = qwen_transform(given_, "torch", patch=14, merge=2, frames=2, max_patches=None).rule
    assert rule == PixelBudget(14, 2, 3136, 23520)
