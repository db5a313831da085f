"""SigLIP2 NaFlex: as transformers' padded and masked batch, its size rule and pixels, and its text tower."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer, models, normalizers, trainers
from transformers import AutoTokenizer, Siglip2Model
from transformers.models.siglip2.tokenization_siglip2 import Siglip2Tokenizer

from encoder.engine import Engine, RawPixels
from encoder.errors import CheckpointError
from encoder.models.siglip2 import resized_positions
from encoder.settings import EngineSettings
from tests.support.checkpoints import unit, worst_cosine
from tests.support.variable_families import naflex_batch, picture, write_naflex

SIZES = [(48, 64), (8, 1200), (1, 1), (500, 700)]
TEXTS = ["A Red CIRCLE", "a red circle", "", "Ünïcode 日本 🙂", "many words " * 60]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_naflex(tmp_path_factory.mktemp("naflex"))
    _tokenizer().save_pretrained(path)
    return path


def _tokenizer() -> Siglip2Tokenizer:
    """A small one, trained on a few words; with an end token, as the published ones have."""
    special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"]
    bytes_ = [f"<0x{byte:02X}>" for byte in range(256)]
    trained = Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True))
    trained.normalizer = normalizers.Replace(" ", "▁")
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special + bytes_, show_progress=False)
    trained.train_from_iterator(["a red circle and many words of a picture, with a blue square"] * 9, trainer)
    model = json.loads(trained.to_str())["model"]
    merges = [tuple(pair) for pair in model["merges"]]
    return Siglip2Tokenizer(vocab=model["vocab"], merges=merges, add_eos_token=True, padding_side="right")


def load(folder: Path, **values: object) -> Engine:
    given = {"model": str(folder), "dtype": "float32", "runner": "eager", "preprocess": "pil", **values}
    return Engine.load(EngineSettings.model_validate(given))


def test_packed_pictures_are_as_in_a_padded_and_masked_batch(folder: Path) -> None:
    engine = load(folder)
    pictures = [picture(height, width) for height, width in SIZES]
    items = [engine.prepare_image(RawPixels(pixels.tobytes(), *pixels.shape)) for pixels in pictures]
    found = engine.forward(items, tokens=True)
    answers = naflex_batch(folder, pictures)
    for vector, features, (expected, patches) in zip(found.vectors, found.tokens, answers, strict=True):
        assert np.abs(unit(vector[None]) - unit(expected[None])).max() <= 2e-5
        assert np.abs(features - patches).max() <= 2e-5 * np.abs(patches).max()


@pytest.mark.parametrize("grid", [(1, 1), (6, 6), (3, 11), (20, 2)])
def test_positions_are_as_torch_interpolates_them(grid: tuple[int, int]) -> None:
    rows, columns = grid
    table = torch.randn(36, 10, generator=torch.Generator().manual_seed(1))
    square = table.T.reshape(1, 10, 6, 6)
    wanted = torch.nn.functional.interpolate(square, size=grid, mode="bilinear", align_corners=False, antialias=True)
    row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
    places = torch.stack([row, column, torch.full(grid, rows), torch.full(grid, columns)], dim=-1).reshape(-1, 4)
    found = resized_positions(table, places)
    assert torch.allclose(found, wanted[0].flatten(1).T, atol=1e-5)
    assert torch.isfinite(resized_positions(table, torch.zeros(2, 4, dtype=torch.int64))).all()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_texts(dtype: str, folder: Path) -> None:
    engine = load(folder, tower="text", dtype=dtype)
    assert engine.info.max_tokens == 64 and engine.info.mask_needs == ("none",)
    items = [engine.prepare_text(text) for text in TEXTS]
    assert items[0].input_ids == items[1].input_ids  # the tokenizer writes all in lower case
    tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = tokenizer(TEXTS, padding="max_length", truncation=True, max_length=64, return_tensors="pt").input_ids
    model = Siglip2Model.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.inference_mode():
        expected = model.text_model(input_ids=ids).pooler_output.numpy()
    found = engine.forward(items).vectors
    if dtype == "float32":
        assert np.abs(unit(found) - unit(expected)).max() <= 2e-5
    assert worst_cosine(found, expected) >= 0.999


def test_the_vision_tower_alone(folder: Path, tmp_path: Path) -> None:
    model = Siglip2Model.from_pretrained(folder)
    model.vision_model.save_pretrained(tmp_path)
    shutil.copy(folder / "preprocessor_config.json", tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "siglip2_vision_model"
    engine, whole = load(tmp_path), load(folder)
    assert np.abs(engine.golden_vectors() - whole.golden_vectors()).max() <= 1e-6
    with pytest.raises(CheckpointError, match="no text tower"):
        load(tmp_path, tower="text")


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("patch_size", 16, "patch_size=16 does not fit the model, which has 8"),
        ("do_resize", False, "do_resize=false is not supported"),
        ("max_num_patches", 0, "max_num_patches=0 must be a whole number of 1 or more"),
        ("image_processor_type", "SiglipImageProcessor", "type SiglipImageProcessor is not Siglip2ImageProcessor"),
        ("do_tile", True, "setting 'do_tile' is not known"),
    ],
)
def test_a_processor_that_does_not_fit_is_named(
    key: str, value: object, reason: str, folder: Path, tmp_path: Path
) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    path = tmp_path / "copy" / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    with pytest.raises(CheckpointError, match=reason):
        load(tmp_path / "copy")
