"""A checkpoint's image processor settings, read strictly: what is not understood is an error that names it.

Facts (transformers 5.24): the defaults of the processor classes in
`models/{clip,siglip,vit,bit,got_ocr2,dinov3_vit}`, the forms of sizes in `image_processing_utils.get_size_dict`; null
means the class' default.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from encoder.errors import CheckpointError
from encoder.preprocess.geometry import Resize

Triple = tuple[float, float, float]
OPENAI_MEAN = (0.48145466, 0.4578275, 0.40821073)
OPENAI_STD = (0.26862954, 0.26130258, 0.27577711)
HALF = (0.5, 0.5, 0.5)
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)
FILTER_NAMES = {1: "lanczos", 2: "bilinear", 3: "bicubic"}

_COMMON: dict[str, Any] = {"do_resize": True, "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True}
_CLIP: dict[str, Any] = {
    **_COMMON,
    "resample": 3,
    "size": {"shortest_edge": 224},
    "default_to_square": False,
    "do_center_crop": True,
    "crop_size": {"height": 224, "width": 224},
    "image_mean": OPENAI_MEAN,
    "image_std": OPENAI_STD,
}
_SQUASHED: dict[str, Any] = {
    **_COMMON,
    "size": {"height": 224, "width": 224},
    "do_center_crop": False,
    "crop_size": None,
    "image_mean": HALF,
    "image_std": HALF,
}
CLASS_DEFAULTS: dict[str, dict[str, Any]] = {
    "CLIP": _CLIP,
    "Bit": _CLIP,
    "Siglip": {**_SQUASHED, "resample": 3, "default_to_square": False},
    "ViT": {**_SQUASHED, "resample": 2, "default_to_square": True},
    # InternVL's; without crop_to_patches it makes one view of a picture.
    "GotOcr2": {
        **_SQUASHED,
        "resample": 3,
        "size": {"height": 384, "width": 384},
        "default_to_square": True,
        "image_mean": OPENAI_MEAN,
        "image_std": OPENAI_STD,
        "min_patches": 1,
        "max_patches": 12,
    },
    "DINOv3ViT": {
        **_SQUASHED,
        "resample": 2,
        "default_to_square": True,
        "image_mean": IMAGENET_MEAN,
        "image_std": IMAGENET_STD,
    },
}
# Rescale before they resize, and so resize floats.
RESCALE_FIRST = frozenset({"DINOv3ViT"})
_CLASS_SUFFIXES = ("ImageProcessorFast", "ImageProcessorPil", "ImageProcessor", "FeatureExtractor", "Processor")
_CLASS_KEYS = ("image_processor_type", "feature_extractor_type", "processor_class")

# No part in the pixels: decoding gives RGB always, and the rest says how a caller gets them.
_HARMLESS = frozenset(
    {
        *_CLASS_KEYS,
        "do_convert_rgb",
        "return_tensors",
        "data_format",
        "input_data_format",
        "device",
        "disable_grouping",
        "image_seq_length",
        "model_input_names",
        "auto_map",
        "_valid_processor_keys",
        "_valid_kwargs_names",
    }
)
# Would change the pixels, and are not done here: only null or false is taken.
_ONLY_OFF = frozenset(
    {
        "do_pad",
        "pad_size",
        "do_flip_channel_order",
        "do_grayscale",
        "do_reduce_labels",
        "do_image_splitting",
        "crop_to_patches",
        "crop_pct",
        "use_square_size",
    }
)


@dataclass(frozen=True)
class ProcessorSettings:
    """What an image processor does, in its order: resize, crop, rescale, normalise. None: that step is left out.

    `rescale_first`: the order is rescale, resize, crop, normalise.
    """

    resize: Resize | None
    filter_name: str
    crop: tuple[int, int] | None
    rescale_factor: float | None
    mean: Triple | None
    std: Triple | None
    rescale_first: bool = False

    @property
    def output_size(self) -> tuple[int, int]:
        """(height, width) of every output. Raises CheckpointError where it would depend on the picture."""
        if self.crop is not None:
            return self.crop
        if self.resize is not None and self.resize.edge == "squash":
            return self.resize.height, self.resize.width
        raise CheckpointError(
            "image processor: without do_center_crop and a size of height and width the output's size depends on the "
            "picture; set either"
        )


def read_processor_settings(config: Mapping[str, Any]) -> ProcessorSettings:
    """Settings of a preprocessor_config.json, or of a processor_config.json with an "image_processor" in it.

    Raises CheckpointError that names the setting it does not understand.
    """
    nested = config.get("image_processor")
    given = nested if isinstance(nested, Mapping) else config
    name = _class_name(given)
    defaults = CLASS_DEFAULTS[name]
    _refuse_unknown(given, defaults)
    merged = {key: default if given.get(key) is None else given[key] for key, default in defaults.items()}
    size = _size(merged["size"], "size", square=_flag(merged, "default_to_square"))
    normalize, rescale = _flag(merged, "do_normalize"), _flag(merged, "do_rescale")
    return ProcessorSettings(
        resize=_resize(size) if _flag(merged, "do_resize") else None,
        filter_name=_filter_name(merged["resample"]),
        crop=_crop(merged["crop_size"]) if _flag(merged, "do_center_crop") else None,
        rescale_factor=_positive(merged["rescale_factor"], "rescale_factor") if rescale else None,
        mean=_triple(merged["image_mean"], "image_mean") if normalize else None,
        std=_std(merged["image_std"]) if normalize else None,
        rescale_first=name in RESCALE_FIRST,
    )


def _class_name(given: Mapping[str, Any]) -> str:
    name = next((given[key] for key in _CLASS_KEYS if given.get(key)), None)
    known = ", ".join(CLASS_DEFAULTS)
    if name is None:
        raise CheckpointError(f"image processor: image_processor_type is missing; known are {known}")
    stem = str(name)
    for suffix in _CLASS_SUFFIXES:
        stem = stem.removesuffix(suffix)
    if stem not in CLASS_DEFAULTS:
        raise CheckpointError(f"image processor: type {name} is not known here; known are {known}")
    return stem


def _refuse_unknown(given: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    for key, value in given.items():
        if key in defaults or key in _HARMLESS:
            continue
        if key not in _ONLY_OFF:  # it may well change the pixels, so it is not passed over
            raise CheckpointError(
                f"image processor: setting {key!r} is not known; remove it if it does not change the pixels"
            )
        if value not in (None, False):
            raise CheckpointError(f"image processor: {key}={value!r} is not supported; set it to false")


def _flag(merged: Mapping[str, Any], key: str) -> bool:
    value = merged[key]
    if not isinstance(value, bool):
        raise CheckpointError(f"image processor: {key}={value!r} must be true or false")
    return value


def _filter_name(resample: object) -> str:
    name = FILTER_NAMES.get(resample) if isinstance(resample, int) and not isinstance(resample, bool) else None
    if name is None:
        choices = ", ".join(f"{number} ({name})" for number, name in FILTER_NAMES.items())
        raise CheckpointError(f"image processor: resample={resample!r} is not supported; it can be {choices}")
    return name


def _size(value: object, key: str, *, square: bool) -> dict[str, int]:
    """A size in any of its written forms, as {"height", "width"}, {"shortest_edge"} and the like."""
    if isinstance(value, int) and not isinstance(value, bool):
        value = {"height": value, "width": value} if square else {"shortest_edge": value}
    elif isinstance(value, list | tuple) and len(value) == 2:
        value = {"height": value[0], "width": value[1]}
    if not isinstance(value, Mapping):
        raise CheckpointError(f"image processor: {key}={value!r} is no size; give height and width, or shortest_edge")
    sides = {str(name): side for name, side in value.items() if side is not None}
    for side in sides.values():
        if not isinstance(side, int) or isinstance(side, bool) or side < 1:
            raise CheckpointError(f"image processor: {key}={dict(value)!r} needs whole numbers of 1 or more")
    return sides


def _resize(size: Mapping[str, int]) -> Resize:
    keys = set(size)
    if keys == {"height", "width"}:
        return Resize("squash", size["height"], size["width"])
    if keys == {"shortest_edge"}:
        return Resize("shortest", size["shortest_edge"], size["shortest_edge"])
    if keys == {"shortest_edge", "longest_edge"}:
        return Resize("shortest_capped", size["shortest_edge"], size["shortest_edge"], size["longest_edge"])
    if keys == {"max_height", "max_width"}:
        return Resize("within", size["max_height"], size["max_width"])
    raise CheckpointError(
        f"image processor: size={dict(size)!r} is not supported; it can have height and width, shortest_edge "
        "(with longest_edge), or max_height and max_width"
    )


def _crop(value: object) -> tuple[int, int]:
    size = _size(value, "crop_size", square=True)
    if set(size) != {"height", "width"}:
        raise CheckpointError(f"image processor: crop_size={size!r} needs height and width")
    return size["height"], size["width"]


def _positive(value: object, key: str) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not value > 0:
        raise CheckpointError(f"image processor: {key}={value!r} must be a number above 0")
    return float(value)


def _triple(value: object, key: str) -> Triple:
    values = list(value) if isinstance(value, list | tuple) else [value] * 3
    numbers = [float(one) for one in values if isinstance(one, int | float) and not isinstance(one, bool)]
    if len(values) != 3 or len(numbers) != 3:
        raise CheckpointError(f"image processor: {key}={value!r} needs three numbers (red, green, blue)")
    return numbers[0], numbers[1], numbers[2]


def _std(value: object) -> Triple:
    std = _triple(value, "image_std")
    if 0.0 in std:
        raise CheckpointError(f"image processor: image_std={value!r} divides by 0")
    return std
