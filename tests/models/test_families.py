"""Every family: its attention goes through the one bridge, and what it cannot do is said at load."""

import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from transformers import CLIPConfig, CLIPModel, Dinov2Model, DINOv3ViTModel

from encoder.engine import Engine
from encoder.errors import CheckpointError
from encoder.models.checkpoint import find_checkpoint
from encoder.models.tower import FAMILIES
from encoder.settings import EngineSettings
from tests.parity.cases import Case
from tests.parity.dual import SMALL_HALF, SMALL_TEXT, clip_processor
from tests.parity.oracles import save_seeded
from tests.parity.pictures import drawn
from tests.parity.registry import all_cases

CASES = all_cases()
VISION_ONLY = ("dinov2-b-14", "dinov2-registers-b-14", "dinov3-b-16", "vit-b-16", "aimv2-l-14", "internvit-300m")


def load(folder: Path, **values: Any) -> Engine:
    settings = {"model": str(folder), "runner": "eager", "dtype": "float32", "buckets": [1], **values}
    return Engine.load(EngineSettings.model_validate(settings))


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_each_layer_attends_once_through_the_bridge(case: Case, tmp_path: Path) -> None:
    folder = case.write(tmp_path / case.name, "small")
    engine = load(folder, self_check=False, strict_backend=True, **case.settings)
    item = engine.prepare_image(drawn(1)[0].data)
    before = engine.report().counters["fused"]
    found = engine.forward([item])
    counters = engine.report().counters
    assert counters["fused"] - before == case.layers(folder) > 0
    assert found.fallback_reason is None and not any(name.startswith("fallback") for name in counters)
    engine.close()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_the_checkpoint_says_whether_there_is_a_text_tower(case: Case, tmp_path: Path) -> None:
    folder = case.write(tmp_path / case.name, "small")
    assert find_checkpoint(str(folder)).has_text is not load(folder, self_check=False, **case.settings).info.vision_only


def test_every_family_has_its_case() -> None:
    """The registry of families and the parity table hold the same architectures."""
    plain = {"aimv2", "clip", "dinov2", "dinov2_with_registers", "dinov3_vit", "metaclip_2", "siglip", "vit"}
    assert plain <= FAMILIES.keys() and plain <= {case.family for case in CASES.values()}


@pytest.mark.parametrize("name", VISION_ONLY)
def test_a_family_for_pictures_alone_has_no_text_tower(name: str, tmp_path: Path) -> None:
    folder = CASES[name].write(tmp_path / "model", "small")
    with pytest.raises(CheckpointError, match="has no text tower: set tower to vision"):
        load(folder, tower="text")
    engine = load(folder, self_check=False)
    assert engine.info.vision_only and engine.info.logit_scale == 0
    assert engine.info.dimensions == engine.info.token_dimensions == json.loads(
        (folder / "config.json").read_text()
    )["hidden_size"]  # fmt: skip
    engine.close()


@pytest.mark.parametrize("name", ["clip-b-32", "siglip-b-16", "vit-b-16", "aimv2-l-14"])
def test_a_processor_of_another_size_is_refused(name: str, tmp_path: Path) -> None:
    folder = CASES[name].write(tmp_path / "model", "small")
    (folder / "preprocessor_config.json").write_text(json.dumps(clip_processor(42)))
    with pytest.raises(CheckpointError, match=r"gives pictures of 42x42, its model takes \d\dx\d\d"):
        load(folder)


@pytest.mark.parametrize("name", ["dinov2-b-14", "dinov3-b-16", "aimv2-l-14-native"])
def test_models_for_any_size_take_the_processors(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    folder = case.write(tmp_path / "model", "small")
    processor = json.loads((folder / "preprocessor_config.json").read_text())
    if processor.get("crop_size"):
        processor["crop_size"] = {"height": 42, "width": 56}
    else:
        processor["size"] = {"height": 32, "width": 80}
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    pictures = drawn(2)
    engine = load(folder)
    items = [engine.prepare_image(picture.data) for picture in pictures]
    found = engine.forward(items, tokens=True)
    expected = case.oracle(folder, case.inputs(folder, "torch", [picture.rgb for picture in pictures]))
    assert abs(found.vectors - expected.vectors).max() <= 1e-4 and engine.grid_of(items[0]) in ((3, 4), (2, 5))
    assert found.tokens[0].shape[0] == engine.grid_of(items[0])[0] * engine.grid_of(items[0])[1]
    engine.close()


def test_positions_are_computed_in_float32_and_rounded_once(tmp_path: Path) -> None:
    """In bfloat16 too: neither rotary frequencies nor embeddings that are resampled may be rounded before."""
    pixels = torch.zeros(1, 3, 48, 64)
    folder = CASES["dinov3-b-16"].write(tmp_path / "dinov3", "small")
    with torch.no_grad():
        rotation = DINOv3ViTModel.from_pretrained(folder, dtype=torch.float32).rope_embeddings(pixels)
    engine = load(folder, dtype="bfloat16", self_check=False)
    found = engine._tower.module.rope_embeddings(pixels.bfloat16())
    assert all(torch.equal(mine, exact.bfloat16()) for mine, exact in zip(found, rotation, strict=True))
    engine.close()
    folder = CASES["dinov2-b-14"].write(tmp_path / "dinov2", "small")
    embeddings = Dinov2Model.from_pretrained(folder, dtype=torch.float32).embeddings
    with torch.no_grad():
        exact = embeddings.interpolate_pos_encoding(torch.zeros(1, 17, 64), 56, 56)
    engine = load(folder, dtype="bfloat16", self_check=False)
    assert torch.equal(engine._tower.module.embeddings.fixed_positions, exact.bfloat16())
    engine.close()


def test_the_projection_is_the_whole_models(tmp_path: Path) -> None:
    """Checkpoints whose halves still carry the class default of projection_dim load all the same."""
    config = CLIPConfig.from_dict({"projection_dim": 40, "vision_config": SMALL_HALF, "text_config": SMALL_TEXT})
    assert config.vision_config.projection_dim == 512
    folder = save_seeded(CLIPModel(config), tmp_path / "model", clip_processor(56))
    engine = load(folder)
    assert engine.info.dimensions == 40
    assert engine.forward([engine.prepare_image(drawn(1)[0].data)]).vectors.shape == (1, 40)
    engine.close()


def timm_checkpoint(folder: Path) -> Path:
    folder.mkdir()
    config = {"architecture": "vit_pe_core_base_patch16_224", "num_classes": 0, "model_type": "timm_wrapper"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors").write_bytes(b"")
    return folder


def test_a_timm_model_names_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = timm_checkpoint(tmp_path / "timm")
    monkeypatch.setitem(sys.modules, "timm", None)
    monkeypatch.setitem(sys.modules, "torchvision", ModuleType("torchvision"))
    with pytest.raises(
        CheckpointError, match=r"'vit_pe_core_base_patch16_224' needs packages .* here: timm \("
    ) as failed:
        load(folder)
    assert "torchvision" not in str(failed.value) and "use a checkpoint in an architecture" in str(failed.value)
    monkeypatch.setitem(sys.modules, "timm", ModuleType("timm"))
    with pytest.raises(CheckpointError, match="calls torch's attention by itself"):
        load(folder)
    with pytest.raises(CheckpointError, match="has no text tower"):
        load(folder, tower="text")


def test_dinov3_has_no_pil_pixels(tmp_path: Path) -> None:
    folder = CASES["dinov3-b-16"].write(tmp_path / "model", "small")
    with pytest.raises(CheckpointError, match="rescales before it resizes: set the preprocess mode to 'torch'"):
        load(folder, preprocess="pil")
