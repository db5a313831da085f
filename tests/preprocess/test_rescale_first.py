"""DINOv3's processor, which rescales before it resizes: floats, bit for bit; and what it is refused for."""

from typing import Any

import numpy as np
import pytest
from PIL import Image

from encoder.errors import CheckpointError
from encoder.preprocess.transform import ImageTransform
from tests.preprocess.torchvision_stand_in import torchvision_stand_in

with torchvision_stand_in():
    from transformers.models.dinov3_vit.image_processing_dinov3_vit import DINOv3ViTImageProcessor
CONFIGS: list[dict[str, Any]] = [
    {},
    {"size": {"height": 64, "width": 96}},
    {"size": 80, "resample": 3},
    {"size": {"height": 48, "width": 48}, "rescale_factor": 0.00392156862745098, "image_mean": [0.43, 0.411, 0.296]},
    {"size": {"height": 60, "width": 60}, "do_normalize": False},
]
SIZES = [(480, 640), (224, 224), (60, 60), (33, 95), (1, 1), (1, 50), (700, 90), (48, 640)]


def transform(**config: Any) -> ImageTransform:
    return ImageTransform.from_config({"image_processor_type": "DINOv3ViTImageProcessorFast", **config}, "torch")


@pytest.mark.parametrize("config", CONFIGS)
def test_pixels_equal_transformers(config: dict[str, Any]) -> None:
    made = transform(**config)
    for height, width in SIZES:
        pixels = np.random.default_rng(height).integers(0, 256, (height, width, 3), dtype=np.uint8)
        with torchvision_stand_in():
            expected = DINOv3ViTImageProcessor(**config)(
                Image.fromarray(pixels), return_tensors="pt"
            ).pixel_values.numpy()
        item = made.resize_crop(pixels)
        assert item.dtype == np.float32 and item.shape == (3, *made.output_size) and item.flags.c_contiguous
        found = made.normalize(item[None])
        assert found.dtype == np.float32 and np.array_equal(found, expected)


def test_levels_are_what_a_picture_of_that_size_would_be() -> None:
    made = transform(size=20)
    pixels = np.random.default_rng(0).integers(0, 256, (20, 20, 3), dtype=np.uint8)
    assert np.array_equal(made.of_levels(pixels.transpose(2, 0, 1)), made.resize_crop(pixels))
    assert made.describe()["order"] == "rescale, resize, normalize"
    plain = ImageTransform.from_config({"image_processor_type": "CLIP"}, "torch")
    assert np.array_equal(plain.of_levels(pixels), pixels) and "order" not in plain.describe()


@pytest.mark.parametrize(
    "config",
    [
        {"do_rescale": False},
        {"do_resize": False, "do_center_crop": True, "crop_size": 30},
        {"size": {"shortest_edge": 64}, "do_center_crop": True, "crop_size": 64},
        {"do_center_crop": True, "crop_size": 64},
    ],
)
def test_what_it_cannot_be_is_refused(config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match="rescales before it resizes needs"):
        transform(**config)
