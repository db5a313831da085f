"""Mllama's vision tower against transformers: tiles, the mask of those that are empty, and where it is computed."""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import MllamaForConditionalGeneration
from transformers.models.mllama.image_processing_pil_mllama import (
    get_all_supported_aspect_ratios,
    get_image_size_fit_to_canvas,
    get_optimal_tiled_canvas,
)
from transformers.models.mllama.modeling_mllama import _prepare_aspect_ratio_attention_mask

from encoder.attention.backend import MaskNeed
from encoder.attention.registry import BACKENDS, backend_class
from encoder.engine import Engine, RawPixels
from encoder.errors import CheckpointError
from encoder.models.checkpoint import find_checkpoint
from encoder.models.mllama import MllamaVision
from encoder.models.tower import load_tower
from encoder.preprocess.tiles import TileTransform, tile_transform
from encoder.settings import EngineSettings
from tests.support.checkpoints import unit, worst_cosine
from tests.support.variable_families import Answer, mllama_oracle, picture, write_mllama

# One tile, several in a row or a column, a square of four, three of four, a single pixel, and extreme ratios.
SIZES = [(28, 28), (30, 60), (90, 25), (60, 60), (28, 80), (1, 1), (3, 400), (600, 5), (300, 200)]
CONFIG = {"image_processor_type": "MllamaImageProcessor", "size": {"height": 28, "width": 28}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_mllama(tmp_path_factory.mktemp("mllama"))


@pytest.fixture(scope="module")
def pictures() -> list[np.ndarray]:
    return [picture(height, width) for height, width in SIZES]


@pytest.fixture(scope="module")
def answers(folder: Path, pictures: list[np.ndarray]) -> list[Answer]:
    oracle = mllama_oracle(folder)
    return [oracle(pixels) for pixels in pictures]


def asked(folder: Path, **values: object) -> EngineSettings:
    given_ = {"model": str(folder), "dtype": "float32", "runner": "eager", "preprocess": "pil", **values}
    return EngineSettings.model_validate(given_)


def prepared(engine: Engine, pictures: list[np.ndarray]) -> list[object]:
    return [engine.prepare_image(RawPixels(pixels.tobytes(), *pixels.shape)) for pixels in pictures]


def farthest(vectors: np.ndarray, answers: list[Answer]) -> float:
    return float(np.abs(unit(vectors) - unit(np.stack([vector for vector, _ in answers]))).max())


@pytest.mark.parametrize("runner", ["eager", "openvino"])
def test_vectors_and_features(
    runner: str, folder: Path, pictures: list[np.ndarray], answers: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("encoder.graphs.proof.SLOWER_THAN_EAGER", 1e9)
    engine = Engine.load(asked(folder, runner=runner, buckets=[1, 4]))
    items = prepared(engine, pictures)
    together = engine.forward(items, tokens=True)
    assert together.runner == runner and together.fallback_reason is None
    assert farthest(together.vectors, answers) <= 2e-5
    for item, features, (_, expected) in zip(items, together.tokens, answers, strict=True):
        tiles, rows, columns = engine.grid_of(item)
        assert features.shape == expected.shape == (tiles * rows * columns, engine.info.token_dimensions)
        assert np.abs(features - expected).max() <= 2e-5 * np.abs(expected).max()
    alone = np.concatenate([engine.forward([item]).vectors for item in items])
    assert np.abs(unit(alone) - unit(together.vectors)).max() <= 1e-5
    engine.close()


def test_bfloat16(folder: Path, pictures: list[np.ndarray], answers: list[Answer]) -> None:
    engine = Engine.load(asked(folder, dtype="bfloat16"))
    found = engine.forward(prepared(engine, pictures)).vectors
    assert worst_cosine(found, np.stack([vector for vector, _ in answers])) >= 0.999


def test_the_mask_matters(
    folder: Path, pictures: list[np.ndarray], answers: list[Answer], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither without it, nor with key padding in its place, are the vectors right."""
    engine = Engine.load(asked(folder, self_check=False))
    items = prepared(engine, pictures)

    def everything(self: MllamaVision, real: torch.Tensor, tokens: int, padded: int) -> torch.Tensor:
        return torch.ones(len(real), 1, 1, self.most * padded, dtype=torch.bool)

    def key_padding(self: MllamaVision, real: torch.Tensor, tokens: int, padded: int) -> torch.Tensor:
        return ((real[..., None] > 0) & (torch.arange(padded) < tokens)).flatten(1)[:, None, None]

    for other in (everything, key_padding):
        monkeypatch.setattr(MllamaVision, "seen", other)
        assert farthest(engine.forward(items).vectors, answers) > 1e-3


@pytest.mark.parametrize("tiles", [1, 2, 3, 4])
def test_the_mask_is_transformers_own(tiles: int, folder: Path) -> None:
    tower = load_tower(find_checkpoint(str(folder)), asked(folder))
    assert isinstance(tower, MllamaVision)
    real = (torch.arange(4) < tiles).long()[None]
    wanted = _prepare_aspect_ratio_attention_mask(real, num_patches=17, target_length=24, dtype=torch.float32)
    assert torch.equal(tower.seen(real, 17, 24), wanted == 0)


def test_no_backend_without_dense_masks_is_given_it(folder: Path) -> None:
    tower = load_tower(find_checkpoint(str(folder)), asked(folder))
    assert tower.spec.mask_needs == {MaskNeed.ADDITIVE}
    takers = {name for name in BACKENDS if MaskNeed.ADDITIVE in backend_class(name).capabilities.mask_needs}
    assert takers == {"sdpa", "reference"}
    engine = Engine.load(asked(folder))
    assert engine.info.mask_needs == ("additive",) and engine.resolved.name == "sdpa"
    assert {check.mask_need for check in engine.report().self_checks} == {"additive"}


def test_batches_keep_to_the_budget_of_tokens(folder: Path) -> None:
    engine = Engine.load(asked(folder, self_check=False, max_batch_tokens=150, buckets=[1, 2, 4]))
    assert [graph.bucket.batch for graph in engine.report().graphs] == [1, 2]  # of 68 tokens each
    engine = Engine.load(asked(folder, self_check=False, max_batch_tokens=10, buckets=[2, 4]))
    assert [graph.bucket.batch for graph in engine.report().graphs] == [2]


def test_the_vision_tower_alone(folder: Path, tmp_path: Path) -> None:
    model = MllamaForConditionalGeneration.from_pretrained(folder)
    model.model.vision_model.save_pretrained(tmp_path)
    shutil.copy(folder / "preprocessor_config.json", tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == "mllama_vision_model"
    engines = [Engine.load(asked(part, self_check=False)) for part in (folder, tmp_path)]
    assert np.array_equal(*(engine.golden_vectors() for engine in engines))
    with pytest.raises(CheckpointError, match="has no text tower"):
        Engine.load(asked(folder, tower="text"))


@settings(max_examples=400, deadline=None)
@given(st.integers(1, 3000), st.integers(1, 3000), st.sampled_from([1, 3, 4, 6]), st.sampled_from([28, 560]))
def test_sizes(height: int, width: int, most: int, side: int) -> None:
    transform = TileTransform(tile_transform(CONFIG, "pil", side=28, most=4).pixels, side, most)
    assert transform.arrangements == get_all_supported_aspect_ratios(most)
    rows, columns = transform.arrangement(height, width)
    canvas = get_optimal_tiled_canvas(height, width, most, side)
    assert (rows * side, columns * side) == canvas
    assert transform.fitted(height, width, rows, columns) == get_image_size_fit_to_canvas(height, width, *canvas, side)


@pytest.mark.parametrize(
    ("key", "value", "reason"),
    [
        ("size", {"height": 56, "width": 56}, "does not fit the model, whose tiles have 28 pixels"),
        ("max_image_tiles", 6, "max_image_tiles=6 does not fit the model, which takes 4"),
        ("do_pad", False, "do_pad=false is not supported"),
        ("image_processor_type", "CLIPImageProcessor", "type CLIPImageProcessor is not MllamaImageProcessor"),
        ("do_mirror", True, "setting 'do_mirror' is not known"),
    ],
)
def test_a_processor_that_does_not_fit_is_named(key: str, value: object, reason: str) -> None:
    with pytest.raises(CheckpointError, match=reason):
        tile_transform({**CONFIG, key: value}, "torch", side=28, most=4)
