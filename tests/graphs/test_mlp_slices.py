"""MLPs in slices give what whole ones give; what is no MLP, or gains nothing, stays as it is."""

from typing import Any

import numpy as np
import openvino
import pytest
import torch
from torch import nn
from torch.nn.functional import gelu, relu, silu

from encoder.graphs.mlp_slices import slice_mlps, slices, tokens_to_slice

WIDTH, HIDDEN, TOKENS = 1536, 1024, 5
# Rows of 1536 bfloat16 numbers: 256 units are 0.75 MiB, 512 are 1.5.
COUNT = 4


class Block(nn.Module):
    """Two products with something between, and a residual."""

    def __init__(self, hidden: int = HIDDEN, bias: bool = True) -> None:
        super().__init__()
        self.up, self.gate = (nn.Linear(WIDTH, hidden, bias=bias) for _ in range(2))
        self.down = nn.Linear(hidden, WIDTH, bias=bias)
        self.norm = nn.LayerNorm(hidden)
        self.scale = nn.Parameter(torch.rand(hidden) + 0.5)
        self.place = nn.Parameter(torch.randn(TOKENS, hidden))


class Exact(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(gelu(self.up(x)))


class Tanh(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(gelu(self.up(x), approximate="tanh"))


class Quick(Block):
    """CLIP's."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.up(x)
        return x + self.down(hidden * torch.sigmoid(1.702 * hidden))


class Scaled(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(relu(self.up(x)) * self.scale - 0.25)


class Gated(Block):
    """SwiGLU with a weight for each half."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(silu(self.gate(x)) * self.up(x))


class Normed(Block):
    """As EVA's: a unit of the hidden layer needs all others."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(gelu(self.up(x))))


class InHalves(Block):
    """SwiGLU with one weight, whose halves meet."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, other = torch.cat([self.up(x), self.gate(x)], dim=-1).chunk(2, dim=-1)
        return x + self.down(silu(one) * other)


class LookedInto(Block):
    """The hidden layer is wanted itself."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = gelu(self.up(x))
        return x + self.down(hidden), hidden


class ByPlace(Block):
    """What is added differs from token to token, not only from unit to unit."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(gelu(self.up(x) + self.place))


CUT: dict[type[Block], int] = {Exact: 2, Tanh: 2, Quick: 2, Scaled: 2, Gated: 3, ByPlace: 2}


def converted(module: Block) -> Any:
    model = openvino.convert_model(module.eval(), example_input=torch.randn(2, TOKENS, WIDTH))
    model.reshape([-1, TOKENS, WIDTH])
    return model


def products(model: Any) -> int:
    return sum(node.get_type_name() == "MatMul" for node in model.get_ordered_ops())


@pytest.mark.parametrize("kind", [*CUT, Normed, InHalves, LookedInto])
@pytest.mark.parametrize("bias", [True, False])
def test_the_numbers_are_torchs(kind: type[Block], bias: bool) -> None:
    torch.manual_seed(0)
    module = kind(bias=bias)
    model = converted(module)
    before = products(model)
    assert tokens_to_slice(model) == (TOKENS if kind in CUT else None)
    assert products(model) == before  # looking changes nothing
    slice_mlps(model)
    assert products(model) == (CUT[kind] * COUNT if kind in CUT else before)
    assert tokens_to_slice(model) is None  # there is no more to cut
    request = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
    for count in (1, 3):
        x = torch.randn(count, TOKENS, WIDTH)
        with torch.no_grad():
            expected = module(x)
        for found, right in zip(
            request.infer([x.numpy()]).values(), expected if isinstance(expected, tuple) else (expected,), strict=True
        ):
            assert np.abs(found - right.numpy()).max() <= 2e-5


def test_every_mlp_of_a_stack_is_cut() -> None:
    torch.manual_seed(0)
    module = nn.Sequential(Exact(), nn.LayerNorm(WIDTH), Gated(), Quick())
    model = converted(module)  # type: ignore[arg-type]
    slice_mlps(model)
    assert products(model) == COUNT * (2 + 3 + 2)
    x = torch.randn(2, TOKENS, WIDTH)
    with torch.no_grad():
        expected = module(x).numpy()
    (found,) = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"})([x.numpy()]).values()
    assert np.abs(found - expected).max() <= 5e-5


def test_open_numbers_of_tokens_are_told() -> None:
    model = converted(Exact())
    model.reshape([-1, -1, WIDTH])
    assert tokens_to_slice(model) == -1


@pytest.mark.parametrize(
    ("hidden", "width", "count"),
    [
        (3072, 768, 4),  # ViT-B: 4.5 MiB, in slices of 1.1
        (4096, 1024, 8),  # ViT-L: 8 MiB, in slices of 1
        (2048, 512, 2),  # CLIP's text tower: 2 MiB, in slices of 1
        (1536, 384, 1),  # ViT-S: 1.1 MiB
        (4304, 1152, 1),  # SO400M: not to be had in multiples of 256
        (2560, 640, 5),  # 3.1 MiB: a quarter is no multiple of 256
        (1280, 512, 1),  # 1.25 MiB to the byte
        (1536, 448, 2),
    ],
)
def test_slices_fit_a_cores_cache(hidden: int, width: int, count: int) -> None:
    assert slices(hidden, 2 * width) == count


def test_a_small_mlp_stays_whole() -> None:
    model = converted(Exact(hidden=256))
    assert tokens_to_slice(model) is None
    slice_mlps(model)
    assert products(model) == 2
