"""Vision towers of real size, and CLIP's text tower, on a simulated 910B: minutes of work, so not run with the rest."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import CLIPTokenizer

from encoder.engine import Engine
from encoder.graphs import proof
from encoder.settings import EngineSettings
from tests.npu_sim.simulator import Simulator
from tests.support.checkpoints import (
    SIGLIP_B_16,
    SIGLIP_SO400M_14_384,
    VIT_B_32,
    VIT_L_14,
    oracle,
    vision_oracle,
    worst_cosine,
    write_clip,
    write_siglip,
)
from tests.support.clip_vocab import clip_tokenizer_folder

# Writer, configuration, layers, head dim as the operator sees it, and the buckets that time allows.
MODELS: dict[str, tuple[Callable[..., Path], dict[str, Any], int, int, list[int]]] = {
    "clip-vit-b-32": (write_clip, VIT_B_32, 12, 64, [1, 4, 8]),
    "clip-vit-l-14": (write_clip, VIT_L_14, 24, 64, [1, 2]),
    "siglip-b-16": (write_siglip, SIGLIP_B_16, 12, 64, [1, 4]),
    "siglip-so400m-14-384": (write_siglip, SIGLIP_SO400M_14_384, 27, 128, [1, 2]),  # a head dim of 72, padded
}


@pytest.fixture(autouse=True)
def any_speed_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "SLOWER_THAN_EAGER", 1e9)


def load(folder: Path, **values: object) -> Engine:
    return Engine.load(EngineSettings.model_validate({"device": "npu", "model": str(folder), **values}))


@pytest.mark.parametrize("name", MODELS)
def test_vision(name: str, tmp_path: Path, simulator: Simulator) -> None:
    write, config, layers, head_dim, buckets = MODELS[name]
    folder = write(tmp_path / name, config)
    engine = load(folder, buckets=buckets)
    report = engine.report()
    assert report.backend.name == "ascend_attn" and report.notes == ()
    assert [(graph.state, graph.reason) for graph in report.graphs] == [("ready", "")] * len(buckets)
    assert all(check.passed for check in report.self_checks)
    items = engine._golden[: buckets[-1]]
    simulator.calls.clear()
    found = engine.forward(items)
    assert (found.runner, found.fallback_reason) == ("npu", None)
    assert [call.query_shape[-1] for call in simulator.calls.fused] == [head_dim] * layers
    assert len({round(call.scale, 9) for call in simulator.calls.fused}) == 1
    pixels = engine._tower.collate(items)["pixel_values"]
    assert worst_cosine(found.vectors, vision_oracle(folder, pixels)) >= 0.998
    eager = engine._forward._run_eager(items)[0].vectors.numpy()
    assert worst_cosine(found.vectors, eager) >= 0.9999
    engine.close()


def test_text(tmp_path: Path, simulator: Simulator) -> None:
    folder = write_clip(tmp_path / "text", VIT_B_32)
    for file in clip_tokenizer_folder().iterdir():
        (folder / file.name).write_bytes(file.read_bytes())
    engine = load(folder, tower="text", buckets=[1, 4])
    report = engine.report()
    assert report.backend.name == "sdpa" and report.backend.rejected[0][0] == "ascend_attn"
    assert {graph.state for graph in report.graphs} == {"ready"} and len(report.graphs) == 8
    texts = ["a photo of a cat", "", "a blue square left of a green triangle", " ".join(["many words"] * 50)]
    found = engine.forward([engine.prepare_text(text) for text in texts])
    model, tokenizer = oracle(folder), CLIPTokenizer.from_pretrained(folder)
    tokens = tokenizer(texts, padding=True, truncation=True, max_length=77, return_tensors="pt")
    with torch.inference_mode():
        pooled = model.text_model(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask).pooler_output
        expected = model.text_projection(pooled).numpy()
    assert found.runner == "npu" and worst_cosine(found.vectors, expected) >= 0.998
    assert not any(call.float_mask for call in simulator.calls.sdpa) and not simulator.calls.fused
    engine.close()
