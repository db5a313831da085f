"""A convolution that cuts patches is replaced by a product that gives the same; any other one stays."""

from typing import Any

import numpy as np
import openvino
import pytest
import torch
from torch import nn

from encoder.graphs.patch_product import patches_as_product

CUTS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "square": ({"kernel_size": 4, "stride": 4}, (12, 12)),
    "wide": ({"kernel_size": (4, 8), "stride": (4, 8)}, (8, 24)),
    "without bias": ({"kernel_size": 4, "stride": 4, "bias": False}, (16, 8)),
}
OTHERS: dict[str, tuple[dict[str, Any], tuple[int, int]]] = {
    "overlapping": ({"kernel_size": 4, "stride": 2}, (12, 12)),
    "padded": ({"kernel_size": 4, "stride": 4, "padding": 1}, (10, 10)),
    "dilated": ({"kernel_size": 2, "stride": 2, "dilation": 2}, (12, 12)),
    "a rest is left": ({"kernel_size": 4, "stride": 4}, (14, 12)),
}


def converted(settings: dict[str, Any], sides: tuple[int, int]) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    module = nn.Conv2d(3, 7, **settings).eval()
    model = openvino.convert_model(module, example_input=torch.randn(2, 3, *sides))
    model.reshape([-1, 3, *sides])
    return module, model


def kinds(model: Any) -> set[str]:
    return {node.get_type_name() for node in model.get_ordered_ops()} & {"Convolution", "MatMul"}


@pytest.mark.parametrize("name", [*CUTS, *OTHERS])
def test_the_numbers_are_torchs(name: str) -> None:
    settings, sides = (CUTS | OTHERS)[name]
    module, model = converted(settings, sides)
    patches_as_product(model)
    assert kinds(model) == ({"MatMul"} if name in CUTS else {"Convolution"})
    request = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
    for count in (1, 3):
        pixels = torch.randn(count, 3, *sides)
        with torch.no_grad():
            expected = module(pixels).numpy()
        (found,) = request.infer([pixels.numpy()]).values()
        assert found.shape == expected.shape
        assert np.abs(found - expected).max() <= 1e-5


def test_sides_that_are_not_known_are_left_alone() -> None:
    settings, _ = CUTS["square"]
    model = converted(settings, (12, 12))[1]
    model.reshape([-1, 3, -1, -1])
    patches_as_product(model)
    assert kinds(model) == {"Convolution"}
