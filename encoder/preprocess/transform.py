"""Pixels to a model's input: resize, crop, rescale and normalise, in one of two exact modes.

`torch`: bit for bit what transformers' default processor gives (5.24, over torchvision): uint8 antialiased
interpolation, a crop that floors, one fused rescale and normalise in float32. torch's kernels with and without vector
instructions give the same bits (torchvision takes floats for bilinear without AVX2; this does not).
`pil`: bit for bit what transformers' PIL processor gives: Pillow's resize, the numpy crop, a rescale that goes through
float64, then normalise. It differs from `torch` by a level here and there, and is slower.

A processor that rescales first (DINOv3's) resizes floats: what it gives between is float32, and only `torch` has it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from PIL import Image

from encoder.errors import CheckpointError
from encoder.preprocess.geometry import Span, center_span
from encoder.preprocess.processor_config import ProcessorSettings, read_processor_settings
from encoder.preprocess.window import PILLOW_BITS, TORCH_BITS, resample_span

Mode = Literal["torch", "pil"]
TORCH_FILTERS = ("bilinear", "bicubic")
PIL_RESAMPLING = {
    "lanczos": Image.Resampling.LANCZOS,
    "bilinear": Image.Resampling.BILINEAR,
    "bicubic": Image.Resampling.BICUBIC,
}
# A resized picture of more pixels is not made whole when a crop keeps a part of it.
LARGE_INTERMEDIATE = 4_000_000


@dataclass(frozen=True)
class ImageTransform:
    """The image processor of one checkpoint. Thread-safe; torch and Pillow work without the GIL."""

    mode: Mode
    settings: ProcessorSettings

    @classmethod
    def from_config(cls, preprocessor_config: Mapping[str, Any], mode: Mode) -> "ImageTransform":
        """Reads preprocessor_config.json (or processor_config.json); raises CheckpointError, naming the setting."""
        settings = read_processor_settings(preprocessor_config)
        if settings.rescale_first:
            _check_rescale_first(settings, mode)
        _ = settings.output_size
        return cls(mode, settings) if settings.resize is None else cls.without_size(settings, mode)

    @classmethod
    def without_size(cls, settings: ProcessorSettings, mode: Mode) -> "ImageTransform":
        """With settings that may leave open to which size. Raises CheckpointError for a filter that `mode` lacks."""
        if mode == "torch" and settings.filter_name not in TORCH_FILTERS:
            raise CheckpointError(f"image processor: {settings.filter_name} resampling needs the preprocess mode 'pil'")
        return cls(mode, settings)

    @property
    def output_size(self) -> tuple[int, int]:
        """(height, width) of every output."""
        return self.settings.output_size

    def resize_crop(self, pixels: np.ndarray) -> np.ndarray:
        """RGB uint8 [h, w, 3] to uint8 [3, H, W], contiguous; float32 where the checkpoint rescales first.

        Raises InvalidImage where a side would shrink to 0.
        """
        if self.settings.rescale_first:
            return self._rescaled_resized(pixels)
        height, width, _ = pixels.shape
        resize, crop = self.settings.resize, self.settings.crop
        if resize is not None:
            height, width = resize.target(height, width)
        if crop is None:
            return np.ascontiguousarray(self.resized(pixels, height, width).transpose(2, 0, 1))
        pad_before: Literal["floor", "ceil"] = "floor" if self.mode == "torch" else "ceil"
        rows = center_span(height, crop[0], pad_before=pad_before)
        columns = center_span(width, crop[1], pad_before=pad_before)
        kept = self._kept(pixels, (height, width), rows, columns).transpose(2, 0, 1)
        if kept.shape[1:] == crop:
            return np.ascontiguousarray(kept)
        padded = np.zeros((3, *crop), dtype=np.uint8)
        padded[:, rows.offset : rows.offset + rows.length, columns.offset : columns.offset + columns.length] = kept
        return padded

    def of_levels(self, levels: np.ndarray) -> np.ndarray:
        """A picture uint8 [3, H, W] of the output's size as `resize_crop` would give it."""
        factor = self.settings.rescale_factor
        if not self.settings.rescale_first or factor is None:
            return levels
        return np.asarray(levels.astype(np.float32) * np.float32(factor))

    def normalize(self, batch: np.ndarray) -> np.ndarray:
        """What `resize_crop` gives, [n, 3, H, W], to float32: the rescale and normalise steps left.

        By numpy, in this thread alone: torch would wake its others, which then spin for milliseconds beside a forward
        on OpenVINO's threads. Measured on two cores with AMX, that took a lone ViT-B/32 forward from 14 to 24 ms.
        """
        levels = self._levels
        out = batch.astype(np.float32) if levels is None else levels[batch]
        self._fuse(out)
        return out

    def normalize_tensor(self, batch: torch.Tensor, *, alone: bool = False) -> torch.Tensor:
        """As `normalize`, with the same bits, by torch: on the tensor's device, and while a graph is recorded.

        alone: by numpy after all, for a tensor on the host.
        """
        if alone:
            return torch.from_numpy(self.normalize(batch.numpy()))
        levels = self._levels
        if levels is None:
            out = batch.to(torch.float32, copy=True)
        else:
            out = torch.from_numpy(levels).to(batch.device)[batch.long()]
        self._fuse(out)
        return out

    @property
    def _levels(self) -> np.ndarray | None:
        """Where levels are rescaled in float64, as Pillow's users do: all that can come of it, float32 [256]."""
        factor = self.settings.rescale_factor
        if self.mode != "pil" or self.settings.rescale_first or factor is None:
            return None
        return (np.arange(256, dtype=np.float64) * factor).astype(np.float32)

    def _fuse(self, out: Any) -> None:
        """The arithmetic of `normalize`, in place on an array or a tensor [n, 3, H, W] of float32."""
        settings = self.settings
        factor = None if settings.rescale_first else settings.rescale_factor
        # The fused form: mean and std are brought to the scale of the pixels, not the pixels to theirs.
        fused = np.float32(1.0 / factor) if self.mode == "torch" and factor is not None else np.float32(1.0)
        if settings.mean is not None and settings.std is not None:
            for channel, (mean, std) in enumerate(zip(settings.mean, settings.std, strict=True)):
                # Plain numbers, rounded to float32: a tensor of them would have to be brought to the device.
                out[:, channel] -= float(np.float32(mean) * fused)
                out[:, channel] /= float(np.float32(std) * fused)
        elif self.mode == "torch" and factor is not None:
            out *= float(np.float32(factor))

    def describe(self) -> dict[str, Any]:
        """JSON-ready; transforms that describe themselves alike give the same numbers."""
        settings = self.settings
        resize = settings.resize
        return {
            "mode": self.mode,
            "resize": None
            if resize is None
            else {"edge": resize.edge, "height": resize.height, "width": resize.width, "cap": resize.cap},
            "interpolation": None if resize is None else settings.filter_name,
            "antialias": True,
            "crop": None if settings.crop is None else list(settings.crop),
            "rescale_factor": settings.rescale_factor,
            "mean": None if settings.mean is None else list(settings.mean),
            "std": None if settings.std is None else list(settings.std),
            "output_size": list(self.output_size),
            **({"order": "rescale, resize, normalize"} if settings.rescale_first else {}),
        }

    def _rescaled_resized(self, pixels: np.ndarray) -> np.ndarray:
        height, width = self.output_size
        levels = np.ascontiguousarray(pixels.transpose(2, 0, 1))
        source = torch.from_numpy(self.of_levels(levels))[None]
        if source.shape[2:] != (height, width):
            source = torch.nn.functional.interpolate(
                source, size=(height, width), mode=self.settings.filter_name, antialias=True, align_corners=False
            )
        return np.ascontiguousarray(source[0].numpy())

    def _kept(self, pixels: np.ndarray, size: tuple[int, int], rows: Span, columns: Span) -> np.ndarray:
        """The rows and columns that a crop keeps of the picture resized to `size`, uint8 [rows, columns, 3]."""
        height, width, _ = pixels.shape
        large = size[0] * size[1] > LARGE_INTERMEDIATE
        bits = TORCH_BITS if self.mode == "torch" else PILLOW_BITS
        # Both libraries resize along the rows first, rounding to uint8 between.
        if large and size[1] > max(width, size[0]):
            part = resample_span(pixels, 1, size[1], columns, self.settings.filter_name, bits)
            return self.resized(part, size[0], columns.length)[rows.start : rows.start + rows.length]
        if large and size[0] > max(height, size[1]):
            part = self.resized(pixels, height, size[1])[:, columns.start : columns.start + columns.length]
            return resample_span(part, 0, size[0], rows, self.settings.filter_name, bits)
        whole = self.resized(pixels, *size)
        return whole[rows.start : rows.start + rows.length, columns.start : columns.start + columns.length]

    def resized(self, pixels: np.ndarray, height: int, width: int) -> np.ndarray:
        """RGB uint8 [h, w, 3] as [height, width, 3], by the mode's own resize."""
        if pixels.shape[:2] == (height, width):
            return pixels
        if self.mode == "pil":
            image = Image.fromarray(np.ascontiguousarray(pixels))
            return np.asarray(image.resize((width, height), PIL_RESAMPLING[self.settings.filter_name]))
        # torch takes no read-only memory without a warning
        source = torch.from_numpy(pixels if pixels.flags.writeable else pixels.copy()).permute(2, 0, 1)[None]
        resized = torch.nn.functional.interpolate(
            source, size=(height, width), mode=self.settings.filter_name, antialias=True, align_corners=False
        )
        return resized[0].permute(1, 2, 0).numpy()


def _check_rescale_first(settings: ProcessorSettings, mode: Mode) -> None:
    if mode != "torch":
        raise CheckpointError("image processor: it rescales before it resizes: set the preprocess mode to 'torch'")
    if settings.rescale_factor is None or settings.resize is None or settings.resize.edge != "squash" or settings.crop:
        raise CheckpointError(
            "image processor: one that rescales before it resizes needs do_rescale, do_resize, a size of height and "
            "width, and no crop"
        )
