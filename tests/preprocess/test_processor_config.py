"""Settings of an image processor: all written forms are read, and what is not understood is refused by name."""

import json
from typing import Any

import pytest

from encoder.errors import CheckpointError
from encoder.preprocess.transform import ImageTransform

OPENAI_CLIP_OF_2021 = {
    "crop_size": 224,
    "do_center_crop": True,
    "do_normalize": True,
    "do_resize": True,
    "feature_extractor_type": "CLIPFeatureExtractor",
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3,
    "size": 224,
}
TODAYS_CLIP = {
    "image_processor_type": "CLIPImageProcessor",
    "do_convert_rgb": True,
    "do_resize": True,
    "size": {"shortest_edge": 224},
    "resample": 3,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "do_rescale": True,
    "rescale_factor": 0.00392156862745098,
    "do_normalize": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}


def read(config: dict[str, Any]) -> ImageTransform:
    return ImageTransform.from_config(config, "torch")


def refused(config: dict[str, Any], mode: Any = "torch") -> str:
    with pytest.raises(CheckpointError) as caught:
        ImageTransform.from_config(config, mode)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_old_and_new_layouts_say_the_same() -> None:
    nested = {"image_processor": TODAYS_CLIP, "processor_class": "CLIPProcessor"}
    fast = {**TODAYS_CLIP, "image_processor_type": "CLIPImageProcessorFast", "default_to_square": False, "device": None}
    described = read(TODAYS_CLIP).describe()
    for other in (OPENAI_CLIP_OF_2021, nested, fast):
        assert read(other).describe() == described
    assert described["resize"] == {"edge": "shortest", "height": 224, "width": 224, "cap": 0}
    assert described["interpolation"] == "bicubic" and described["output_size"] == [224, 224]
    assert json.loads(json.dumps(described)) == described


def test_an_int_is_the_shorter_side_or_a_square_as_the_class_has_it() -> None:
    clip, vit = read({"image_processor_type": "CLIP", "size": 100}), read({"image_processor_type": "ViT", "size": 100})
    assert clip.settings.resize is not None and clip.settings.resize.edge == "shortest"
    assert vit.settings.resize is not None and vit.settings.resize.edge == "squash"
    assert clip.output_size == (224, 224) and vit.output_size == (100, 100)


@pytest.mark.parametrize("key", ["resample", "size", "do_resize", "image_mean", "rescale_factor", "crop_size"])
def test_null_means_the_default_of_the_class(key: str) -> None:
    assert read({**TODAYS_CLIP, key: None}).describe() == read(TODAYS_CLIP).describe()


def test_harmless_and_switched_off_settings_are_passed_over() -> None:
    extra = {"do_pad": False, "pad_size": None, "auto_map": {}, "return_tensors": None, "_valid_processor_keys": ["x"]}
    assert read({**TODAYS_CLIP, **extra}).describe() == read(TODAYS_CLIP).describe()


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"resample": 0}, "resample=0 is not supported"),
        ({"resample": 4}, "resample=4 is not supported"),
        ({"resample": "bicubic"}, "resample='bicubic'"),
        ({"resample": True}, "resample=True"),
        ({"resample": 1}, "lanczos resampling needs the preprocess mode 'pil'"),
        ({"do_pad": True}, "do_pad=True is not supported"),
        ({"pad_size": {"height": 1, "width": 1}}, "pad_size="),
        ({"crop_pct": 0.9}, "crop_pct=0.9 is not supported"),
        ({"antialias": False}, "setting 'antialias' is not known"),
        ({"size": {"longest_edge": 224}}, "size={'longest_edge': 224} is not supported"),
        ({"size": {"height": 224}}, "size={'height': 224}"),
        ({"size": {"height": 224, "width": 0}}, "whole numbers of 1 or more"),
        ({"size": {"shortest_edge": 224.5}}, "whole numbers of 1 or more"),
        ({"size": "224"}, "size='224' is no size"),
        ({"size": [1, 2, 3]}, "size=[1, 2, 3] is no size"),
        ({"crop_size": {"shortest_edge": 224}}, "crop_size={'shortest_edge': 224} needs height and width"),
        ({"do_center_crop": False}, "depends on the picture"),
        ({"do_resize": False, "do_center_crop": False}, "depends on the picture"),
        ({"do_resize": "yes"}, "do_resize='yes' must be true or false"),
        ({"image_mean": [0.5, 0.5]}, "image_mean=[0.5, 0.5] needs three numbers"),
        ({"image_mean": [0.5, 0.5, "x"]}, "image_mean="),
        ({"image_std": [0.5, 0, 0.5]}, "divides by 0"),
        ({"rescale_factor": 0}, "rescale_factor=0 must be a number above 0"),
        ({"rescale_factor": "1/255"}, "rescale_factor='1/255'"),
        ({"image_processor_type": "Qwen2VLImageProcessor"}, "type Qwen2VLImageProcessor is not known"),
        ({"image_processor_type": None}, "image_processor_type is missing"),
    ],
)
def test_what_is_not_understood_is_named(changed: dict[str, Any], named: str) -> None:
    assert named in refused({**TODAYS_CLIP, **changed})


@pytest.mark.parametrize(
    "changed",
    [
        {"size": {"shortest_edge": 225}},
        {"size": {"height": 224, "width": 224}},
        {"size": {"shortest_edge": 224, "longest_edge": 448}},
        {"crop_size": 223},
        {"resample": 2},
        {"do_rescale": False},
        {"do_normalize": False},
        {"do_resize": False},
        {"rescale_factor": 1 / 256},
        {"image_mean": [0.5, 0.4578275, 0.40821073]},
        {"image_std": [0.5, 0.26130258, 0.27577711]},
    ],
)
def test_whatever_changes_pixels_changes_the_description(changed: dict[str, Any]) -> None:
    assert read({**TODAYS_CLIP, **changed}).describe() != read(TODAYS_CLIP).describe()
