"""InternViT out of a whole InternVL checkpoint, and what its processor may ask for."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import InternVLConfig, InternVLForConditionalGeneration, InternVLVisionModel, Qwen2Config

from encoder.engine import Engine
from encoder.errors import CheckpointError
from encoder.settings import EngineSettings
from tests.parity.variable import SMALL_INTERN, write_internvl

TEXT = Qwen2Config(
    hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2,
    vocab_size=200, bos_token_id=0, eos_token_id=1,
)  # fmt: skip


def load(folder: Path, **values: object) -> Engine:
    given = {"model": str(folder), "dtype": "float32", "runner": "eager", "self_check": False, **values}
    return Engine.load(EngineSettings.model_validate(given))


@pytest.fixture
def alone(tmp_path: Path) -> Path:
    return write_internvl(tmp_path / "alone", "small")


def test_of_a_whole_model_the_vision_tower_is_taken(alone: Path, tmp_path: Path) -> None:
    vision = InternVLVisionModel.from_pretrained(alone)
    model = InternVLForConditionalGeneration(InternVLConfig(vision_config=vision.config, text_config=TEXT))
    model.model.vision_tower.load_state_dict(vision.state_dict())
    model.save_pretrained(tmp_path / "whole", max_shard_size="60KB")
    shutil.copy(alone / "preprocessor_config.json", tmp_path / "whole")
    config = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert config["model_type"] == "internvl" and len(list((tmp_path / "whole").glob("*.safetensors"))) > 1
    engines = [load(alone), load(tmp_path / "whole")]
    assert np.array_equal(*(engine.golden_vectors() for engine in engines))
    assert engines[1].info.family == "internvl" and engines[1].info.vision_only


def test_normalised_queries_and_keys(tmp_path: Path) -> None:
    """As the models of six billion parameters have them, with RMS norms."""
    write_internvl(tmp_path / "model", "small")
    config = InternVLVisionModel.from_pretrained(tmp_path / "model").config
    config.use_qk_norm, config.norm_type = True, "rms_norm"
    torch.manual_seed(1)
    model = InternVLVisionModel(config).eval()
    for name, weight in model.named_parameters():
        if "norm" in name:
            weight.data.normal_(1.0, 0.2)
    model.save_pretrained(tmp_path / "model")
    engine = load(tmp_path / "model")
    pixels = engine._tower.collate(engine._golden)["pixel_values"]
    with torch.inference_mode():
        expected = model(pixel_values=pixels).last_hidden_state[:, 1:].mean(dim=1).numpy()
    assert np.abs(engine.golden_vectors() - expected).max() <= 1e-5


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("crop_to_patches", True, "crop_to_patches=True is not supported; set it to false"),
        ("size", {"height": 42, "width": 42}, "gives pictures of 42x42, its model takes 56x56"),
    ],
)
def test_a_processor_that_does_not_fit_is_named(key: str, value: object, reason: str, alone: Path) -> None:
    path = alone / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(CheckpointError, match=reason):
        load(alone)


def test_positions_are_those_of_the_checkpoint(alone: Path) -> None:
    """They are computed once, at load: the module's own, with the class token's in front."""
    engine = load(alone)
    module = engine._tower.module
    patches = (SMALL_INTERN["image_size"] // 14) ** 2
    assert module.embeddings.fixed_positions.shape == (1, 1 + patches, SMALL_INTERN["hidden_size"])
    assert torch.equal(module.embeddings.fixed_positions, module.embeddings.position_embeddings)
