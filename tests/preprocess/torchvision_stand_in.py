"""transformers' torchvision-backed processors, run for real over the five torchvision functions they call.

torchvision does not import beside the pinned torch. Its functions here are one-liners over torch as torchvision 0.29
defines them; sizes, crops, padding, fusing and the order of steps stay transformers' own code. That the whole equals
real torchvision is what the golden pixels (test_transform_golden.py) say.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace

import torch
import transformers.image_processing_backends as backends

_NAMES = SimpleNamespace(BILINEAR="bilinear", BICUBIC="bicubic", LANCZOS="lanczos")


def _resize(image: torch.Tensor, size: tuple[int, int], interpolation: str, antialias: bool) -> torch.Tensor:
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    return torch.nn.functional.interpolate(image, size=tuple(size), mode=interpolation, antialias=antialias)


def _pad(image: torch.Tensor, padding: list[int], fill: int) -> torch.Tensor:
    left, top, right, bottom = padding
    return torch.nn.functional.pad(image, (left, right, top, bottom), value=fill)


def _crop(image: torch.Tensor, top: int, left: int, height: int, width: int) -> torch.Tensor:
    return image[..., top : top + height, left : left + width]


def _normalize(image: torch.Tensor, mean: object, std: object, inplace: bool = False) -> torch.Tensor:
    shift, scale = (torch.as_tensor(values, dtype=image.dtype).view(-1, 1, 1) for values in (mean, std))
    return (image.sub_(shift) if inplace else image.sub(shift)).div_(scale)


@contextmanager
def torchvision_stand_in() -> Iterator[None]:
    """Puts the functions where transformers looks for torchvision's; takes them away after."""
    before = {name: vars(backends).get(name) for name in ("tvF", "pil_torch_interpolation_mapping")}
    functions = {"resize": _resize, "pad": _pad, "crop": _crop, "normalize": _normalize}
    vars(backends)["tvF"] = SimpleNamespace(InterpolationMode=_NAMES, **functions)
    vars(backends)["pil_torch_interpolation_mapping"] = {2: "bilinear", 3: "bicubic"}
    try:
        yield
    finally:
        vars(backends).update(before)
