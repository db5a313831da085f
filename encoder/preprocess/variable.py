"""Pictures that keep their proportions: resized to whole patches, as many as the processor's own rule gives them."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from encoder.errors import CheckpointError, InvalidImage
from encoder.preprocess.processor_config import HALF, OPENAI_MEAN, OPENAI_STD, read_processor_settings
from encoder.preprocess.transform import ImageTransform, Mode

# Qwen's processors refuse pictures that are narrower (transformers 5.24, `smart_resize`).
WIDEST_RATIO = 200


class SizeRule(Protocol):
    """How large a picture becomes."""

    @property
    def longest(self) -> int:
        """The most patches that a picture can have."""
        ...

    def target(self, height: int, width: int) -> tuple[int, int]:
        """(height, width) in pixels, whole patches. Raises InvalidImage for a picture that the rule does not take."""
        ...

    def describe(self) -> dict[str, Any]:
        """JSON-ready."""
        ...


@dataclass(frozen=True)
class PixelBudget:
    """Qwen's rule: sides that are multiples of `patch` x `merge`, and an area of `min_pixels` to `max_pixels`.

    As `smart_resize` of transformers 5.24, whose sides and area may pass the bounds by less than one block.
    """

    patch: int
    merge: int
    min_pixels: int
    max_pixels: int

    @property
    def longest(self) -> int:
        block = self.patch * self.merge
        # A picture that is as narrow as may be becomes one block high; growing to the minimum rounds both sides up.
        narrowest = math.floor(math.sqrt(WIDEST_RATIO * self.max_pixels) / block) * block * block
        grown = math.sqrt(self.min_pixels * WIDEST_RATIO) + math.sqrt(self.min_pixels / WIDEST_RATIO)
        pixels = max(self.max_pixels, narrowest, math.ceil(self.min_pixels + block * grown + block * block))
        return pixels // block**2 * self.merge**2

    def target(self, height: int, width: int) -> tuple[int, int]:
        if max(height, width) > WIDEST_RATIO * min(height, width):
            raise InvalidImage(
                f"the picture is {width}x{height}: this model takes none that is more than {WIDEST_RATIO} times "
                "as long as it is wide; crop it"
            )
        block = self.patch * self.merge
        new_height, new_width = round(height / block) * block, round(width / block) * block
        if new_height * new_width > self.max_pixels:
            shrink = math.sqrt(height * width / self.max_pixels)
            new_height, new_width = (max(block, math.floor(s / shrink / block) * block) for s in (height, width))
        elif new_height * new_width < self.min_pixels:
            grow = math.sqrt(self.min_pixels / (height * width))
            new_height, new_width = (math.ceil(side * grow / block) * block for side in (height, width))
        if min(new_height, new_width) < 1:
            raise InvalidImage(f"the picture is {width}x{height}: too narrow for this model, a side would shrink to 0")
        return new_height, new_width

    def describe(self) -> dict[str, Any]:
        return {
            "rule": "pixel budget", "multiple": self.patch * self.merge,
            "min_pixels": self.min_pixels, "max_pixels": self.max_pixels,
        }  # fmt: skip


@dataclass(frozen=True)
class PatchBudget:
    """NaFlex's rule: the largest picture of its proportions that has at most `max_patches` patches, both sides rounded
    up to whole ones; enlarged at most 100 times. The scale is found by halving, as in transformers 5.24.
    """

    patch: int
    max_patches: int

    @property
    def longest(self) -> int:
        return self.max_patches

    def target(self, height: int, width: int) -> tuple[int, int]:
        precision = 1e-5
        low, high = precision / 10, 100.0
        while high - low >= precision:
            middle = (low + high) / 2
            rows, columns = self._patches(middle, height), self._patches(middle, width)
            if rows * columns <= self.max_patches:
                low = middle
            else:
                high = middle
        return self._patches(low, height) * self.patch, self._patches(low, width) * self.patch

    def describe(self) -> dict[str, Any]:
        return {"rule": "patch budget", "multiple": self.patch, "max_patches": self.max_patches}

    def _patches(self, scale: float, side: int) -> int:
        return max(1, math.ceil(side * scale / self.patch))


@dataclass(frozen=True)
class VariableTransform:
    """An image processor without one output size: resize by a rule, rescale, normalise. Thread-safe."""

    pixels: ImageTransform
    rule: SizeRule

    def resize(self, pixels: np.ndarray) -> np.ndarray:
        """RGB uint8 [h, w, 3] to uint8 [3, H, W], contiguous. Raises InvalidImage for what the rule does not take."""
        height, width = self.rule.target(*pixels.shape[:2])
        return np.ascontiguousarray(self.pixels.resized(pixels, height, width).transpose(2, 0, 1))

    def normalize(self, levels: torch.Tensor, *, alone: bool = False) -> torch.Tensor:
        """uint8 [n, 3, ...] to float32 of the same shape, on its device; alone: on the host, in this thread only."""
        return self.pixels.normalize_tensor(levels, alone=alone)

    @property
    def by_arithmetic(self) -> bool:
        """Whether `normalize` is nothing but arithmetic, which any device can do while it is captured."""
        return self.pixels.mode == "torch"

    def describe(self) -> dict[str, Any]:
        """JSON-ready; transforms that describe themselves alike give the same numbers."""
        settings = self.pixels.settings
        return {
            "mode": self.pixels.mode,
            "resize": self.rule.describe(),
            "interpolation": settings.filter_name,
            "antialias": True,
            "rescale_factor": settings.rescale_factor,
            "mean": None if settings.mean is None else list(settings.mean),
            "std": None if settings.std is None else list(settings.std),
        }


def qwen_transform(
    config: Mapping[str, Any], mode: Mode, *, patch: int, merge: int, frames: int, max_patches: int | None
) -> VariableTransform:
    """Of a Qwen2VLImageProcessor's settings, for a model with such patches; `max_patches` can lower its maximum.

    Raises CheckpointError that names the setting which does not fit.
    """
    own = _Own(config, "Qwen2VL")
    own.expect("patch_size", 14, patch)
    own.expect("merge_size", 2, merge)
    own.expect("temporal_patch_size", 2, frames)
    size = own.take("size", None) or {}
    if not isinstance(size, Mapping) or set(size) - {"shortest_edge", "longest_edge", "min_pixels", "max_pixels"}:
        raise CheckpointError(f"image processor: size={size!r} needs shortest_edge and longest_edge, in pixels")
    least = own.whole("min_pixels", size.get("shortest_edge") or size.get("min_pixels") or 56 * 56)
    most = own.whole("max_pixels", size.get("longest_edge") or size.get("max_pixels") or 28 * 28 * 1280)
    if max_patches is not None:
        most = min(most, max_patches * patch**2)
    if most < least:
        raise CheckpointError(
            f"image processor: pictures of at least {least} pixels do not go with at most {most}: "
            f"give a max_patches of {math.ceil(least / patch**2)} or more"
        )
    transform = own.transform(mode, resample=3, mean=OPENAI_MEAN, std=OPENAI_STD)
    return VariableTransform(transform, PixelBudget(patch, merge, least, most))


def naflex_transform(
    config: Mapping[str, Any], mode: Mode, *, patch: int, max_patches: int | None
) -> VariableTransform:
    """Of a Siglip2ImageProcessor's settings, for a model with such patches; `max_patches` can lower its maximum.

    Raises CheckpointError that names the setting which does not fit.
    """
    own = _Own(config, "Siglip2")
    own.expect("patch_size", 16, patch)
    own.take("size", None)  # its class knows none, and looks at none that a file may hold
    most = own.whole("max_num_patches", 256)
    transform = own.transform(mode, resample=2, mean=HALF, std=HALF)
    return VariableTransform(transform, PatchBudget(patch, most if max_patches is None else min(most, max_patches)))


class _Own:
    """The settings of a processor class that only it has; what is left over is read like any other processor's."""

    def __init__(self, config: Mapping[str, Any], stem: str) -> None:
        nested = config.get("image_processor")
        self._left = dict(nested if isinstance(nested, Mapping) else config)
        name = str(self._left.pop("image_processor_type", None))
        if not name.startswith(f"{stem}ImageProcessor"):
            raise CheckpointError(f"image processor: type {name} is not {stem}ImageProcessor, which this model takes")
        if self.take("do_resize", True) is not True:
            raise CheckpointError("image processor: do_resize=false is not supported, patches need whole sides")

    def take(self, key: str, default: Any) -> Any:
        found = self._left.pop(key, None)
        return default if found is None else found

    def whole(self, key: str, default: int) -> int:
        value = self.take(key, default)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise CheckpointError(f"image processor: {key}={value!r} must be a whole number of 1 or more")
        return value

    def expect(self, key: str, default: int, wanted: int) -> None:
        value = self.whole(key, default)
        if value != wanted:
            raise CheckpointError(f"image processor: {key}={value} does not fit the model, which has {wanted}")

    def transform(self, mode: Mode, **defaults: Any) -> ImageTransform:
        """What is left: filter, rescale and normalise."""
        names = {"resample": "resample", "mean": "image_mean", "std": "image_std"}
        given = {names[key]: default for key, default in defaults.items()}
        given |= {key: value for key, value in self._left.items() if value is not None}
        # The common reader knows no such class: here CLIP stands for one that neither resizes nor crops by itself.
        plain = {"image_processor_type": "CLIPImageProcessor", "do_resize": False, "do_center_crop": False}
        return ImageTransform.without_size(read_processor_settings(given | plain), mode)
