"""Taking the pooled token early changes no vector and no feature, and is done where it can be and only there."""

from collections.abc import Callable
from typing import Any

import numpy as np
import openvino
import pytest
import torch
from torch import nn

from encoder.graphs.pooled_token import split_at_pooled_token

WIDTH, TOKENS, HEADS = 32, 6, 4


class Layer(nn.Module):
    """Attention, then what works token by token."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.after = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 2 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = [part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(self.before(x)).chunk(3, -1)]
        attended = nn.functional.scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2)
        x = x + self.out(attended)
        return x + self.down(nn.functional.gelu(self.up(self.after(x))))


class Small(nn.Module):
    """Two layers and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.norm, self.head = nn.Sequential(Layer(), Layer()), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 5)
        self.place = nn.Parameter(torch.randn(1, TOKENS, WIDTH))
        self.gain = nn.Parameter(torch.randn(WIDTH))


class ClassToken(Small):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.layers(x)
        return self.head(self.norm(hidden[:, 0])), hidden[:, 1:]


class NormBeforeTheChoice(Small):
    """Features are after the norm and a gain per channel, as DINO's."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.norm(self.layers(x)) * self.gain
        return hidden[:, 0], hidden[:, 1:]


class LastToken(Small):
    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (self.head(self.norm(self.layers(x))[:, -1]),)


class EndOfText(Small):
    """At a place of its own in each text, as CLIP's text tower takes it."""

    def forward(self, x: torch.Tensor, ids: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.norm(self.layers(x))
        return (self.head(hidden[torch.arange(hidden.shape[0]), (ids == 7).int().argmax(dim=-1)]),)


class PlaceAfterAttention(Small):
    """What is added differs from token to token: the token can be taken only behind it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.layers(x) * self.place
        return self.head(self.norm(hidden)[:, 2]), hidden[:, 1:]


class NormOverAllTokens(Small):
    """As one row of all: the token can be taken only behind it."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = nn.functional.layer_norm(self.layers(x), (TOKENS, WIDTH))
        return self.head((hidden * self.gain)[:, 0]), hidden[:, 1:]


class Mean(Small):
    """No token is chosen."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.layers(x)
        return self.head(self.norm(hidden).mean(1)), hidden


class FeaturesFromElsewhere(Small):
    """Features that the last layers have no part in: they cannot take up where the token was taken."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return self.head(self.norm(self.layers(x)[:, 0])), x + self.place


class AddedToAll(Small):
    """The mean of the tokens is added to each: one row for all, in which no token has a place."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        hidden = self.layers(x)
        return self.head(self.norm(hidden + hidden.mean(1, keepdim=True))[:, 3]), hidden


# Whether the token is taken before the last layer's linear layers, and whether features become a model of their own.
CASES: dict[type[Small], tuple[bool, bool]] = {
    ClassToken: (True, True),
    NormBeforeTheChoice: (True, True),
    LastToken: (True, False),
    EndOfText: (True, False),
    PlaceAfterAttention: (False, True),
    NormOverAllTokens: (False, True),
    Mean: (False, False),
    FeaturesFromElsewhere: (False, False),
    AddedToAll: (False, False),
}


@pytest.fixture(params=CASES, ids=lambda case: case.__name__)
def case(request: pytest.FixtureRequest) -> type[Small]:
    chosen: type[Small] = request.param
    return chosen


def inputs_of(case: type[Small], count: int, seed: int = 0) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, TOKENS, WIDTH, generator=generator)
    if case is not EndOfText:
        return (x,)
    ids = torch.ones(count, TOKENS, dtype=torch.int64)
    ids[torch.arange(count), torch.randint(0, TOKENS, (count,), generator=generator)] = 7
    return x, ids


def converted(case: type[Small]) -> tuple[Small, Any]:
    torch.manual_seed(0)
    module = case().eval()
    with torch.no_grad():
        for norm in (one for one in module.modules() if isinstance(one, nn.LayerNorm)):
            norm.weight.copy_(torch.randn(WIDTH))
            norm.bias.copy_(torch.randn(WIDTH))
        model = openvino.convert_model(module, example_input=inputs_of(case, 2))
    tokens = -1 if case is EndOfText else TOKENS  # texts have any length
    model.reshape({port: [-1, tokens, WIDTH][: port.get_partial_shape().rank.get_length()] for port in model.inputs})
    return module, model


def compiled(model: Any) -> Callable[..., list[np.ndarray]]:
    request = openvino.Core().compile_model(model, "CPU", {"INFERENCE_PRECISION_HINT": "f32"}).create_infer_request()
    return lambda *arrays: [np.array(found) for found in request.infer(list(arrays)).values()]


def rows_of(model: Any) -> list[tuple[int, int]]:
    """Tokens an item and width of each product of three dimensions, in order; tracing left some counts open."""
    shapes = [node.get_output_partial_shape(0) for node in model.get_ordered_ops() if node.get_type_name() == "MatMul"]
    return [
        (shape[1].get_length() if shape[1].is_static else TOKENS, shape[2].get_length())
        for shape in shapes
        if shape.rank.get_length() == 3
    ]


def widest_rows(model: Any) -> int:
    """Tokens that the last linear layer of twice the width is computed for."""
    return [rows for rows, width in rows_of(model) if width == 2 * WIDTH][-1]


def test_the_vectors_and_features_are_torchs(case: type[Small]) -> None:
    module, model = converted(case)
    split = split_at_pooled_token(model)
    vectors, features = compiled(split.vectors), compiled(split.features) if split.features is not None else None
    for count in (3, 1, 5):
        inputs = inputs_of(case, count, seed=count)
        with torch.no_grad():
            expected = [part.numpy() for part in module(*inputs)]
        found, *rest = vectors(*(tensor.numpy() for tensor in inputs))
        assert np.abs(found - expected[0]).max() <= 1e-5
        if len(expected) > 1:
            (given,) = features(*rest) if features is not None else rest
            assert np.abs(given - expected[1]).max() <= 1e-5


def test_the_token_is_taken_as_early_as_it_can_be(case: type[Small]) -> None:
    early, apart = CASES[case]
    split = split_at_pooled_token(converted(case)[1])
    assert widest_rows(split.vectors) == (1 if early else TOKENS)
    assert (split.features is not None) == apart
    if split.features is not None:
        assert widest_rows(split.features) == TOKENS if early else True


def test_all_layers_but_the_last_see_every_token() -> None:
    split = split_at_pooled_token(converted(ClassToken)[1])
    # qkv, out, up and down of the first layer, qkv of the last; then its out, up and down.
    assert [rows for rows, _ in rows_of(split.vectors)] == [TOKENS] * 5 + [1] * 3


def test_what_is_handed_on_has_the_type_that_is_computed_in() -> None:
    split = split_at_pooled_token(converted(ClassToken)[1], handed_on="bf16")
    assert [str(port.get_element_type()) for port in split.vectors.outputs] == [
        "<Type: 'float32'>", "<Type: 'bfloat16'>", "<Type: 'bfloat16'>",
    ]  # fmt: skip
    assert [str(port.get_element_type()) for port in split.features.inputs] == ["<Type: 'bfloat16'>"] * 2
