"""Patch features against transformers' own: the right rows, in order, without the class token."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import CLIPVisionModelWithProjection, SiglipVisionModel

from encoder.demo import demo_model_path
from encoder.engine import Engine
from encoder.graphs import proof
from encoder.settings import EngineSettings
from tests.support.checkpoints import write_siglip

SMALL = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
SIGLIP = {
    "vision_config": {**SMALL, "image_size": 48, "patch_size": 16},
    "text_config": {**SMALL, "vocab_size": 99, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1},
}


@pytest.fixture(autouse=True)
def any_speed_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "SLOWER_THAN_EAGER", 1e9)


def expected_of(folder: Path, pixels: torch.Tensor) -> np.ndarray:
    """Features float32 [n, t, F]."""
    clip = json.loads((folder / "config.json").read_text())["model_type"] == "clip"
    kind = CLIPVisionModelWithProjection if clip else SiglipVisionModel
    model = kind.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.inference_mode():
        hidden = model(pixel_values=pixels).last_hidden_state
    return (hidden[:, 1:] if clip else hidden).numpy()


@pytest.mark.parametrize("runner", ["eager", "openvino"])
@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_features_equal_transformers(family: str, runner: str, tmp_path: Path) -> None:
    folder = demo_model_path() if family == "clip" else write_siglip(tmp_path / "siglip", SIGLIP)
    model = "demo" if family == "clip" else str(folder)
    settings = {"model": model, "dtype": "float32", "runner": runner, "buckets": [2, 4]}
    engine = Engine.load(EngineSettings.model_validate(settings))
    items = engine._golden[:3]
    expected = expected_of(folder, engine._tower.collate(items)["pixel_values"])
    found = engine.forward(items, tokens=True)
    assert found.runner == runner and len(found.tokens) == 3
    for item, ours, theirs in zip(items, found.tokens, expected, strict=True):
        assert len(ours) == np.prod(engine.grid_of(item)) == len(theirs)
        assert np.abs(ours - theirs).max() <= 1e-4 * np.abs(theirs).max()
