"""Vision towers of transformers on a simulated NPU, eager and captured, against the same model on the CPU."""

import pytest
import torch
import torch_npu
import transformers

from tests.npu_sim.simulator import Simulator

SMALL = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
PICTURE = {"image_size": 32, "patch_size": 8}
TOWERS = {
    "clip": (transformers.CLIPVisionModel, transformers.CLIPVisionConfig(**SMALL, **PICTURE)),
    "siglip": (transformers.SiglipVisionModel, transformers.SiglipVisionConfig(**SMALL, **PICTURE)),
    "vit": (transformers.ViTModel, transformers.ViTConfig(**SMALL, **PICTURE)),
    "dinov2": (transformers.Dinov2Model, transformers.Dinov2Config(**SMALL, **PICTURE)),
}
LAYERS = SMALL["num_hidden_layers"]


def tower(family: str) -> torch.nn.Module:
    """A small random tower with sdpa attention in bfloat16."""
    torch.manual_seed(0)
    model, config = TOWERS[family]
    config._attn_implementation = "sdpa"
    return model(config).eval().bfloat16()


def pooled(model: torch.nn.Module, pixels: torch.Tensor) -> torch.Tensor:
    out: torch.Tensor = model(pixel_values=pixels).pooler_output
    return out


@pytest.mark.parametrize("family", TOWERS)
def test_vision_tower_eager_and_captured(family: str, simulator: Simulator) -> None:
    batches = [torch.randn(2, 3, 32, 32).bfloat16() for _ in range(3)]
    with torch.inference_mode():
        model = tower(family)
        expected = [pooled(model, pixels) for pixels in batches]
        assert not torch.allclose(expected[0], expected[1], atol=1e-2)
        model = model.to("npu:0")
        for pixels, want in zip(batches, expected, strict=True):
            torch.testing.assert_close(pooled(model, pixels.to("npu:0")).cpu(), want, atol=1e-2, rtol=1e-2)
        assert [call.query_shape[:2] for call in simulator.calls.sdpa] == [(2, 4)] * LAYERS * 3
        buffer = torch.zeros(2, 3, 32, 32, dtype=torch.bfloat16, device="npu:0")
        graph = torch_npu.npu.NPUGraph()
        with torch_npu.npu.graph(graph):
            out = pooled(model, buffer)
        assert out.cpu().isnan().all()
        for pixels, want in zip(batches, expected, strict=True):
            buffer.copy_(pixels)
            graph.replay()
            torch.testing.assert_close(out.cpu(), want, atol=1e-2, rtol=1e-2)
    assert not simulator.calls.fused


def test_text_tower_with_padding() -> None:
    """CLIP text brings a causal mask and key padding along."""
    config = transformers.CLIPTextConfig(**SMALL, vocab_size=99, bos_token_id=0, eos_token_id=98, pad_token_id=1)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    model = transformers.CLIPTextModel(config).eval().bfloat16()
    ids = torch.tensor([[0, 5, 6, 98, 1, 1], [0, 7, 8, 9, 10, 98]])
    inputs = {"input_ids": ids, "attention_mask": (ids != 1).long()}
    with torch.inference_mode():
        expected = model(**inputs).pooler_output
        got = model.to("npu:0")(**{name: x.to("npu:0") for name, x in inputs.items()}).pooler_output
    torch.testing.assert_close(got.cpu(), expected, atol=1e-2, rtol=1e-2)
