"""Ordinary torch operators on npu tensors, against the same operators on the CPU."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

Function = Callable[..., torch.Tensor]
TOKENS = torch.linspace(-2, 2, 2 * 5 * 8).reshape(2, 5, 8)
PIXELS = torch.linspace(-1, 1, 2 * 3 * 32 * 32).reshape(2, 3, 32, 32)
PATCHES = torch.linspace(-0.1, 0.1, 8 * 3 * 16 * 16).reshape(8, 3, 16, 16)
WEIGHT = torch.linspace(-1, 1, 4 * 8).reshape(4, 8)

CASES: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "linear": (lambda x, w: F.linear(x, w, w[:, 0]), (TOKENS, WEIGHT)),
    "matmul": (lambda x: x @ x.transpose(1, 2), (TOKENS,)),
    "bmm_half": (lambda x: x.half() @ x.half().transpose(1, 2), (TOKENS,)),
    "einsum": (lambda x: torch.einsum("bsd,btd->bst", x, x), (TOKENS,)),
    "layer_norm": (lambda x, w: F.layer_norm(x, (8,), w[0], w[1]), (TOKENS, WEIGHT)),
    "rms_norm": (lambda x: F.rms_norm(x, (8,)), (TOKENS,)),
    "conv2d_patches": (lambda x, w: F.conv2d(x, w, stride=16).flatten(2).transpose(1, 2), (PIXELS, PATCHES)),
    "interpolate_bicubic": (lambda x: F.interpolate(x, size=(20, 20), mode="bicubic"), (PIXELS,)),
    "interpolate_bilinear": (lambda x: F.interpolate(x, size=(20, 20), mode="bilinear"), (PIXELS,)),
    "embedding": (lambda w: F.embedding(torch.tensor([[1, 3]]).to(w.device), w), (WEIGHT,)),
    "softmax": (lambda x: x.softmax(-1), (TOKENS,)),
    "gelu": (F.gelu, (TOKENS,)),
    "gelu_tanh": (lambda x: F.gelu(x, approximate="tanh"), (TOKENS,)),
    "silu": (F.silu, (TOKENS,)),
    "quick_gelu": (lambda x: x * torch.sigmoid(1.702 * x), (TOKENS,)),
    "normalize": (lambda x: F.normalize(x, dim=-1), (TOKENS,)),
    "cat": (lambda x: torch.cat([x, x + 1], 1), (TOKENS,)),
    "stack": (lambda x: torch.stack([x, x]), (TOKENS,)),
    "split": (lambda x: torch.cat(x.split(2, 1)[::-1], 1), (TOKENS,)),
    "chunk": (lambda x: x.chunk(2, -1)[1], (TOKENS,)),
    "pad": (lambda x: F.pad(x, (0, 3)), (TOKENS,)),
    "mean": (lambda x: x.mean(1), (TOKENS,)),
    "cumsum": (lambda x: x.cumsum(1), (TOKENS,)),
    "where": (lambda x: torch.where(x > 0, x, -x), (TOKENS,)),
    "masked_fill": (lambda x: x.masked_fill(x > 0, 0.0), (TOKENS,)),
    "index_list": (lambda x: x[:, [0, 2]], (TOKENS,)),
    "index_slice": (lambda x: x[:, 1::2, -3:], (TOKENS,)),
    "index_pairs": (lambda x: x[torch.arange(2, device=x.device), x[..., 0].argmax(-1)], (TOKENS,)),
    "index_bool": (lambda x: x[x > 0], (TOKENS,)),
    "index_assign": (lambda x: _assigned(x.clone()), (TOKENS,)),
    "gather": (lambda x: x.gather(1, torch.zeros(2, 1, 8, dtype=torch.long, device=x.device)), (TOKENS,)),
    "repeat_interleave": (lambda x: x.repeat_interleave(2, 0), (TOKENS,)),
    "expand": (lambda x: x[:1].expand(3, -1, -1).contiguous(), (TOKENS,)),
    "arange": (lambda x: torch.arange(8, device=x.device) + x, (TOKENS,)),
    "linspace": (lambda x: torch.linspace(0, 1, 8, device=x.device) + x, (TOKENS,)),
    "full": (lambda x: torch.full((8,), 3.0, device=x.device) + x, (TOKENS,)),
    "tril": (lambda x: torch.ones(5, 5, device=x.device, dtype=torch.bool).tril() & (x[0, :, :5] > 0), (TOKENS,)),
    "to_dtype": (lambda x: x.to(torch.float16).to(torch.float32), (TOKENS,)),
    "transpose_contiguous": (lambda x: x.permute(2, 0, 1).contiguous(), (TOKENS,)),
    "python_scalars": (lambda x: (1 - x) / 2 + x**2, (TOKENS,)),
    "cpu_scalar_tensor": (lambda x: x * torch.tensor(2.0), (TOKENS,)),
    "in_place": (lambda x: x.clone().add_(1).mul_(x), (TOKENS,)),
    "sdpa": (lambda x: F.scaled_dot_product_attention(*[x[:, None]] * 3), (TOKENS,)),
    "sdpa_causal": (lambda x: F.scaled_dot_product_attention(*[x[:, None]] * 3, is_causal=True), (TOKENS,)),
    "sdpa_bool_mask": (lambda x: F.scaled_dot_product_attention(*[x[:, None]] * 3, attn_mask=_band(x)), (TOKENS,)),
    "bicubic_uint8_like": (lambda x: (x * 40 + 100).clamp(0, 255).round().to(torch.uint8), (TOKENS,)),
}


def _assigned(x: torch.Tensor) -> torch.Tensor:
    x[:, 0] = 7.0
    x[0, 1:3] += 1
    return x


def _band(x: torch.Tensor) -> torch.Tensor:
    place = torch.arange(5, device=x.device)
    return (place[:, None] - place).abs() < 2


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("mode", ["inference_mode", "no_grad", "grad"])
def test_operator_equals_the_cpu(name: str, mode: str) -> None:
    function, inputs = CASES[name]
    contexts = {"inference_mode": torch.inference_mode, "no_grad": torch.no_grad, "grad": torch.enable_grad}
    with contexts[mode]():
        expected = function(*inputs)
        got = function(*(x.to("npu:0") for x in inputs))
    assert got.device == torch.device("npu:0")
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got.cpu(), expected, atol=1e-6, rtol=1e-6)


def test_host_copies_keep_values_strides_and_dtypes() -> None:
    x = torch.arange(6, dtype=torch.float32).view(2, 3)
    there = x.t().to("npu:0", torch.float16)
    assert torch.equal(there.cpu(), x.t().half())
    assert torch.equal(there.t().cpu(), x.half())
    target = torch.zeros(3, 2, device="npu:0")
    target.t().copy_(x)
    assert torch.equal(target.cpu(), x.t())
    assert torch.equal(torch.zeros(3, 2, device="npu:0").copy_(x.t()).cpu(), x.t())
    assert torch.equal(torch.zeros(3, 2).copy_(x.to("npu:0").t()), x.t())
    assert torch.equal(torch.zeros(4, 3, device="npu:0").copy_(x[0]).cpu(), x[0].expand(4, 3))
    home = torch.zeros(3, 2)
    home.t().copy_(x.to("npu:0"))
    assert torch.equal(home, x.t())
    assert x.to("npu:0")[1, 2].item() == 5.0
    assert x.to("npu:0").tolist() == x.tolist()


def test_a_view_on_the_device_shares_its_memory() -> None:
    x = torch.zeros(4, 4, device="npu:0")
    x.view(16)[5] = 9.0
    x[2].fill_(1.0)
    assert x.cpu()[1, 1] == 9.0
    assert x.sum().item() == 13.0


def test_fresh_memory_is_not_zero() -> None:
    assert torch.empty(1000, device="npu:1").cpu().isnan().all()


def test_an_operator_between_device_and_host_is_refused() -> None:
    x = torch.ones(3, device="npu:0")
    with pytest.raises(RuntimeError, match="same device"):
        x + torch.ones(3)
    with pytest.raises(RuntimeError, match="same device"):
        F.linear(x, torch.ones(2, 3))


def test_modules_move_and_compute() -> None:
    torch.manual_seed(0)
    block = torch.nn.Sequential(
        torch.nn.Conv2d(3, 8, 16, stride=16), torch.nn.Flatten(2), torch.nn.Linear(4, 4), torch.nn.LayerNorm(4)
    ).eval()
    with torch.inference_mode():
        expected = block(PIXELS)
        got = block.to("npu:1")(PIXELS.to("npu:1"))
    assert {p.device for p in block.parameters()} == {torch.device("npu:1")}
    torch.testing.assert_close(got.cpu(), expected, atol=1e-6, rtol=1e-6)
