"""Text towers against transformers: which token is pooled, what the mask holds, which letters the tokenizer sees."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import (
    Aimv2Config,
    Aimv2Model,
    AutoTokenizer,
    CLIPConfig,
    CLIPModel,
    MetaClip2Config,
    MetaClip2Model,
    SiglipConfig,
    SiglipModel,
)

from encoder.engine import Engine
from encoder.errors import InvalidText
from encoder.settings import EngineSettings
from tests.parity.dual import SMALL_HALF, SMALL_TEXT, clip_processor, siglip_processor
from tests.parity.oracles import save_seeded
from tests.support.checkpoints import unit
from tests.support.small_tokenizers import save_clip, save_gemma, save_xlm_roberta

TEXTS = ["a cat", "", "cab", "A Cat Sat!", "the quick brown fox jumps over the lazy dog again and again", "zz zz"]
LENGTH = 16


def dual_config(vocabulary: int, **text: Any) -> dict[str, Any]:
    half = SMALL_TEXT | {"vocab_size": vocabulary, "max_position_embeddings": LENGTH, "projection_dim": 48} | text
    return {"projection_dim": 48, "vision_config": SMALL_HALF | {"projection_dim": 48}, "text_config": half}


def write_clip(folder: Path, *, legacy: bool) -> Any:
    end = save_clip(folder)
    torch.manual_seed(1)
    special = {"bos_token_id": end - 1, "eos_token_id": 2 if legacy else end, "pad_token_id": end}
    model = CLIPModel(CLIPConfig.from_dict(dual_config(end + 1, **special)))
    save_seeded(model, folder, clip_processor(56), sharpen=3.0)
    return CLIPModel


def write_metaclip_2(folder: Path) -> Any:
    end = save_xlm_roberta(folder)
    torch.manual_seed(1)
    model = MetaClip2Model(MetaClip2Config.from_dict(dual_config(120, eos_token_id=end)))
    save_seeded(model, folder, clip_processor(56), sharpen=3.0)
    return MetaClip2Model


def write_aimv2(folder: Path) -> Any:
    end = save_clip(folder)
    torch.manual_seed(1)
    config = dual_config(end + 1, eos_token_id=end)
    for name in ("bos_token_id", "pad_token_id", "projection_dim"):
        config["text_config"].pop(name)
    save_seeded(Aimv2Model(Aimv2Config.from_dict(config)), folder, clip_processor(56), sharpen=3.0)
    return Aimv2Model


WRITERS: dict[str, Callable[[Path], Any]] = {
    "clip": lambda folder: write_clip(folder, legacy=False),
    "clip with the old id": lambda folder: write_clip(folder, legacy=True),
    "metaclip_2": write_metaclip_2,
    "aimv2": write_aimv2,
}


@pytest.fixture(scope="module", params=WRITERS)
def written(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    folder = tmp_path_factory.mktemp("text")
    return folder, WRITERS[request.param](folder)


def open_text(folder: Path, **values: Any) -> Engine:
    settings = {"model": str(folder), "tower": "text", "dtype": "float32", "buckets": [1, 8], **values}
    return Engine.load(EngineSettings.model_validate(settings))


def expected(folder: Path, model_class: Any) -> np.ndarray:
    """transformers' own projected vectors, each text alone: its eager attention, its own mask, nothing padded."""
    model = model_class.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    rows = []
    for text in TEXTS:
        tokens = tokenizer(text, truncation=True, max_length=LENGTH, return_tensors="pt")
        with torch.inference_mode():
            found = model.get_text_features(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask)
        rows.append(found.pooler_output.numpy())
    return np.concatenate(rows)


@pytest.mark.parametrize("runner", ["eager", "openvino"])
def test_vectors_equal_transformers(written: tuple[Path, Any], runner: str) -> None:
    folder, model_class = written
    wanted = unit(expected(folder, model_class))
    assert np.abs(wanted[0] - wanted[2]).max() > 0.01  # texts that are to be told apart
    engine = open_text(folder, runner=runner)
    items = [engine.prepare_text(text) for text in TEXTS]
    found = engine.forward(items)
    assert np.abs(unit(found.vectors) - wanted).max() <= 2e-5
    for item, row in zip(items, wanted, strict=True):
        assert np.abs(unit(engine.forward([item]).vectors)[0] - row).max() <= 2e-5
    assert found.fallback_reason is None
    engine.close()


def write_siglip(folder: Path, *, lower: bool) -> None:
    save_gemma(folder, lower=lower)
    torch.manual_seed(1)
    half = SMALL_TEXT | {"vocab_size": 99, "max_position_embeddings": 64, "projection_size": 64}
    config = SiglipConfig.from_dict({"vision_config": SMALL_HALF, "text_config": half})
    save_seeded(SiglipModel(config), folder, siglip_processor(56), sharpen=1.5)


@pytest.mark.parametrize("lower", [False, True])
def test_siglip2_of_fixed_size(tmp_path: Path, lower: bool) -> None:
    """64 tokens, padded and not masked; letters are made small by the tokenizer that does so, and by no other."""
    write_siglip(tmp_path, lower=lower)
    engine = open_text(tmp_path, runner="eager")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path)
    tokens = tokenizer(TEXTS, padding="max_length", truncation=True, max_length=64, return_tensors="pt")
    model = SiglipModel.from_pretrained(tmp_path, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.inference_mode():
        wanted = model.get_text_features(input_ids=tokens.input_ids).pooler_output.numpy()
    items = [engine.prepare_text(text) for text in TEXTS]
    assert torch.equal(engine._tower.collate(items)["input_ids"], tokens.input_ids)
    assert np.abs(unit(engine.forward(items).vectors) - unit(wanted)).max() <= 2e-5
    same = engine.prepare_text("A CAT").input_ids == engine.prepare_text("a cat").input_ids
    assert same is lower
    assert engine.info.max_tokens == 64
    with pytest.raises(InvalidText, match="the model takes 64"):
        engine.prepare_text("a" * 64, overflow="refuse")
    engine.close()
