"""The Qwen vision towers: windows that matter and are proven, where weights come from, positions on the device."""

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLVisionRotaryEmbedding
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

from encoder.attention.backend import ITEM_BOUNDARIES, WINDOW_BOUNDARIES
from encoder.attention.dispatch import Dispatcher, SegmentsByName
from encoder.attention.registry import backend_class
from encoder.attention.resolve import ResolvedBackend
from encoder.engine import Engine, RawPixels
from encoder.errors import CheckpointError, InvalidImage
from encoder.graphs import proof
from encoder.graphs.bucketed import BucketedForward
from encoder.graphs.eager import EagerRunner
from encoder.graphs.packing import fits_packed, packed_buckets, pad_packed
from encoder.graphs.runner import Bucket
from encoder.models.checkpoint import find_checkpoint
from encoder.models.qwen2_5_vl import Qwen25Vision
from encoder.models.qwen3_vl import resampled_positions
from encoder.models.qwen_vl import rotation
from encoder.models.tower import Inputs, load_tower
from encoder.settings import EngineSettings
from tests.graphs.fakes import CPU
from tests.graphs.test_captured import Runner, varlen
from tests.support.checkpoints import unit, worst_cosine
from tests.support.variable_families import QWEN, picture, qwen_oracle, write_qwen

PICTURES = [(110, 150), (64, 300), (48, 64)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_qwen("qwen2_5_vl", tmp_path_factory.mktemp("qwen2_5_vl"))


def asked(folder: Path, **values: object) -> EngineSettings:
    given_ = {"model": str(folder), "dtype": "float32", "runner": "eager", "preprocess": "pil", **values}
    return EngineSettings.model_validate(given_)


def windowed(folder: Path) -> Qwen25Vision:
    tower = load_tower(find_checkpoint(str(folder)), asked(folder))
    assert isinstance(tower, Qwen25Vision)
    return tower


def off(folder: Path, engine: Engine) -> float:
    """How far the vectors of some pictures are from transformers'."""
    oracle = qwen_oracle("qwen2_5_vl", folder)
    pictures = [picture(height, width) for height, width in PICTURES]
    items = [engine.prepare_image(RawPixels(pixels.tobytes(), *pixels.shape)) for pixels in pictures]
    expected = np.stack([oracle(pixels)[0] for pixels in pictures])
    return float(np.abs(unit(engine.forward(items).vectors) - unit(expected)).max())


@pytest.mark.parametrize("everywhere", [ITEM_BOUNDARIES, WINDOW_BOUNDARIES])
def test_the_windows_matter(everywhere: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one kind of boundaries for all layers the vectors are others."""
    engine = Engine.load(asked(folder, self_check=False))
    assert off(folder, engine) <= 2e-5
    monkeypatch.setattr(Qwen25Vision, "boundaries_of", lambda self, layer: everywhere)
    assert off(folder, engine) > 1e-2


class OldWindows(Runner):
    """The windows of the capture stay; the boundaries of items are the batch's."""

    def capture_segments(self, bucket: Bucket, inputs: Inputs, static: Inputs) -> SegmentsByName:
        found = dict(super().capture_segments(bucket, inputs, static))
        kept = found[WINDOW_BOUNDARIES]
        found[WINDOW_BOUNDARIES] = dataclasses.replace(kept, cu_seqlens=kept.cu_seqlens.clone())
        return found


class WindowsOfItems(Runner):
    """Every layer is given the boundaries of items."""

    def capture_segments(self, bucket: Bucket, inputs: Inputs, static: Inputs) -> SegmentsByName:
        items = super().capture_segments(bucket, inputs, static)[ITEM_BOUNDARIES]
        return {ITEM_BOUNDARIES: items, WINDOW_BOUNDARIES: items}


@pytest.mark.parametrize("backend", ["varlen", "sdpa"])
@pytest.mark.parametrize("kind", [OldWindows, WindowsOfItems])
def test_the_proof_sees_both_kinds_of_boundaries(
    kind: type[Runner], backend: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(proof, "SLOWER_THAN_EAGER", 1e9)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    tower = windowed(folder)
    tower.module.to(torch.bfloat16)
    buckets = packed_buckets(128, [1, 3], multiple=4, windows=tower.spec.windows)[1:]
    dispatcher = Dispatcher(ResolvedBackend(backend, "server", "a test", backend_class(backend).capabilities))
    runner, eager = (kind_(tower, dispatcher, CPU, torch.bfloat16) for kind_ in (kind, EagerRunner))
    forward = BucketedForward(runner, eager, buckets)
    forward.prepare(tower.golden_items(), lambda message: None)
    assert {record.state for record in forward.records} == {"disabled"}
    assert all(record.reason.startswith("replay differs from eager") for record in forward.records)
    items = tower.golden_items()
    assert worst_cosine(forward.run(items).vectors, forward._run_eager(items)[0].vectors.numpy()) >= 0.9999


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 9), st.integers(1, 12)), min_size=1, max_size=9))
def test_every_batch_that_fits_a_budget_has_room_for_its_windows(grids: list[tuple[int, int]]) -> None:
    tower = windowed_for_sizes()
    items = [np.zeros((3, rows * 28, columns * 28), np.uint8) for rows, columns in grids]
    lengths = [tower.length_of(item) for item in items]
    inputs = tower.collate(items)
    widths = inputs[WINDOW_BOUNDARIES].diff()
    assert widths.min() > 0 and widths.max() <= tower.spec.windows.longest
    for bucket in packed_buckets(max(lengths), [1, 4, 9], multiple=4, windows=tower.spec.windows):
        if fits_packed(bucket, lengths):
            padded = pad_packed(inputs, bucket)
            assert padded[WINDOW_BOUNDARIES].shape == (bucket.windows + 1,)
            assert padded[WINDOW_BOUNDARIES][-1] == padded[ITEM_BOUNDARIES][-1] == bucket.tokens
            assert padded[WINDOW_BOUNDARIES].diff().max() <= bucket.max_window


_SIZES: list[Qwen25Vision] = []


def windowed_for_sizes() -> Qwen25Vision:
    """One for all examples."""
    if not _SIZES:
        import tempfile

        with tempfile.TemporaryDirectory() as scratch:
            _SIZES.append(windowed(write_qwen("qwen2_5_vl", Path(scratch))))
    return _SIZES[0]


@pytest.mark.parametrize("name", QWEN)
def test_the_vision_tower_alone(name: str, tmp_path: Path) -> None:
    write_qwen(name, tmp_path / "whole")
    _, model_class, _ = QWEN[name]
    visual = model_class.from_pretrained(tmp_path / "whole").model.visual
    visual.save_pretrained(tmp_path / "alone")
    shutil.copy(tmp_path / "whole" / "preprocessor_config.json", tmp_path / "alone")
    assert json.loads((tmp_path / "alone" / "config.json").read_text())["model_type"] == f"{name}_vision"
    engines = [Engine.load(asked(tmp_path / part, self_check=False)) for part in ("whole", "alone")]
    assert np.array_equal(*(engine.golden_vectors() for engine in engines))
    # Of the whole checkpoint only what the tower needs is there.
    held = {key for key, _ in engines[0]._tower.module.named_parameters()}
    assert held <= {key for key, _ in visual.named_parameters()} and not any("deepstack" in key for key in held)


def test_what_they_refuse(folder: Path) -> None:
    with pytest.raises(CheckpointError, match="'qwen2_5_vl' is for pictures alone and has no text tower"):
        Engine.load(asked(folder, tower="text"))
    with pytest.raises(CheckpointError, match="give a max_patches of 4 or more"):
        Engine.load(asked(folder, max_patches=3))
    engine = Engine.load(asked(folder, self_check=False))
    narrow = picture(2, 401)
    with pytest.raises(InvalidImage, match="401x2: this model takes none that is more than 200 times"):
        engine.prepare_image(RawPixels(narrow.tobytes(), *narrow.shape))


def test_a_missing_weight_is_named(folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder, tmp_path / "copy")
    config = json.loads((folder / "config.json").read_text())
    config["vision_config"]["depth"] = 4
    (tmp_path / "copy" / "config.json").write_text(json.dumps(config))
    with pytest.raises(CheckpointError, match=r"weights are missing .*blocks\.3\."):
        Engine.load(asked(tmp_path / "copy"))


def test_rotary_positions_are_transformers_own() -> None:
    config = QWEN["qwen2_vl"][0](vision_config=QWEN["qwen2_vl"][2]).vision_config
    places = get_vision_position_ids(torch.tensor([[1, 60, 44]]), 2)
    wanted = Qwen2VLVisionRotaryEmbedding(config)(torch.zeros(1), places)
    for found, expected in zip(rotation(places, 32, 10000.0), wanted, strict=True):
        assert torch.allclose(found, expected, atol=2e-6)


@pytest.mark.parametrize("grid", [(2, 2), (6, 6), (4, 22), (40, 2)])
def test_learned_positions_are_transformers_own(grid: tuple[int, int]) -> None:
    table = torch.randn(36, 8, generator=torch.Generator().manual_seed(1))
    thw = torch.tensor([[1, *grid]])
    index, weight = get_vision_interpolation_indices_and_weights(
        thw, 6, mode="bilinear", align_corners=True, spatial_merge_size=2
    )
    wanted = (table[index] * weight[..., None]).sum(1)
    places = torch.cat([get_vision_position_ids(thw, 2), torch.tensor(grid).expand(len(index), 2)], dim=1)
    assert torch.allclose(resampled_positions(table, places), wanted, atol=1e-5)
    assert torch.isfinite(resampled_positions(table, torch.zeros(2, 4, dtype=torch.int64))).all()
