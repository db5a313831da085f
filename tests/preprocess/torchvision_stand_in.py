"""transformers' torchvision-backed processors, run for real over the five torchvision functions they call.

torchvision does not import beside the pinned torch. Its functions here are one-liners over torch as torchvision 0.29
defines them; sizes, crops, padding, fusing and the order of steps stay transformers' own code. That the whole equals
real torchvision is what the golden pixels (test_transform_golden.py) say.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType, SimpleNamespace

import torch
import transformers.image_processing_backends as backends

_V2 = "torchvision.transforms.v2"
_MODULES = ("torchvision", "torchvision.transforms", _V2, f"{_V2}.functional")
_NAMES = SimpleNamespace(BILINEAR="bilinear", BICUBIC="bicubic", LANCZOS="lanczos")


def _resize(image: torch.Tensor, size: tuple[int, int], interpolation: str, antialias: bool) -> torch.Tensor:
    if tuple(image.shape[-2:]) == tuple(size):
        return image
    batch = image if image.dim() == 4 else image[None]
    resized = torch.nn.functional.interpolate(batch, size=tuple(size), mode=interpolation, antialias=antialias)
    return resized if image.dim() == 4 else resized[0]


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
    """Puts the functions where transformers looks for torchvision's; takes them away after.

    Inside, modules of transformers that import torchvision by themselves can be imported.
    """
    before = {name: vars(backends).get(name) for name in ("tvF", "pil_torch_interpolation_mapping")}
    functions = {"resize": _resize, "pad": _pad, "crop": _crop, "normalize": _normalize}
    vars(backends)["tvF"] = SimpleNamespace(InterpolationMode=_NAMES, **functions)
    vars(backends)["pil_torch_interpolation_mapping"] = {2: "bilinear", 3: "bicubic"}
    made = {name: ModuleType(name) for name in _MODULES if name not in sys.modules}
    vars(made.get(_MODULES[-1], ModuleType(""))).update(InterpolationMode=_NAMES, **functions)
    vars(made.get(_MODULES[-2], ModuleType(""))).update(functional=made.get(_MODULES[-1]))
    sys.modules.update(made)
    try:
        yield
    finally:
        vars(backends).update(before)
        for name in made:
            del sys.modules[name]
