"""Families with pictures of many sizes against transformers: alone, together, captured; every size, both dtypes."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from encoder.attention import dispatch
from encoder.attention.backend import AttentionCall
from encoder.attention.dispatch import Dispatcher
from encoder.attention.registry import backend_class
from encoder.attention.resolve import ResolvedBackend
from encoder.engine import Engine, RawPixels
from encoder.graphs import proof
from encoder.graphs.bucketed import BucketedForward
from encoder.graphs.eager import EagerRunner
from encoder.graphs.packing import packed_buckets
from encoder.models.checkpoint import find_checkpoint
from encoder.models.tower import load_tower
from encoder.settings import EngineSettings
from tests.graphs.fakes import CPU
from tests.graphs.test_captured import Runner, varlen
from tests.support.checkpoints import unit, worst_cosine
from tests.support.variable_families import FAMILIES, Answer, picture

# Height and width: usual ones, extreme ratios, less than a patch, a single pixel, and more than the largest.
SIZES = [(48, 64), (90, 40), (8, 1200), (700, 9), (3, 5), (1, 1), (500, 700), (64, 64), (110, 150)]


class Case:
    """A family's checkpoint, pictures, and what transformers says of each."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.family = name, FAMILIES[name]
        self.folder = self.family.write(folder)
        self.pictures = [picture(height, width, seed) for seed, (height, width) in enumerate(SIZES)]
        oracle = self.family.load(self.folder)
        self.answers = [oracle(pixels) for pixels in self.pictures]

        self._engines: dict[str, Engine] = {}

    def engine(self, dtype: str = "float32") -> Engine:
        """One of each dtype, with what every start proves."""
        if dtype not in self._engines:
            self._engines[dtype] = Engine.load(self.settings(dtype=dtype))
        return self._engines[dtype]

    def settings(self, **values: object) -> EngineSettings:
        given = {"model": str(self.folder), "dtype": "float32", "runner": "eager", "preprocess": "pil", **values}
        return EngineSettings.model_validate(given)


@pytest.fixture(scope="module", params=FAMILIES)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(request.param, tmp_path_factory.mktemp(request.param))


def prepared(engine: Engine, pictures: list[np.ndarray]) -> list[Any]:
    return [engine.prepare_image(RawPixels(pixels.tobytes(), *pixels.shape)) for pixels in pictures]


def farthest(vectors: np.ndarray, answers: list[Answer]) -> float:
    return float(np.abs(unit(vectors) - unit(np.stack([vector for vector, _ in answers]))).max())


def test_each_picture_is_as_transformers_has_it_alone(case: Case) -> None:
    engine = case.engine()
    items = prepared(engine, case.pictures)
    together = engine.forward(items, tokens=True)
    assert farthest(together.vectors, case.answers) <= 2e-5
    for item, features, (_, expected) in zip(items, together.tokens, case.answers, strict=True):
        rows, columns = engine.grid_of(item)
        assert features.shape == expected.shape == (rows * columns, engine.info.token_dimensions)
        assert np.abs(features - expected).max() <= 2e-5 * max(1.0, np.abs(expected).max())
    alone = np.concatenate([engine.forward([item]).vectors for item in items])
    assert np.abs(unit(alone) - unit(together.vectors)).max() <= 1e-5
    backwards = engine.forward(items[::-1]).vectors[::-1]
    assert np.abs(unit(backwards) - unit(together.vectors)).max() <= 1e-5


def test_bfloat16(case: Case) -> None:
    engine = case.engine("bfloat16")
    vectors = engine.forward(prepared(engine, case.pictures)).vectors
    assert worst_cosine(vectors, np.stack([vector for vector, _ in case.answers])) >= 0.999


def test_the_segments_matter(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without them the pictures of a batch would see each other, and the vectors would be others."""
    engine = case.engine()
    items = prepared(engine, case.pictures)

    def everyone_sees_everyone(self: Dispatcher, call: AttentionCall) -> torch.Tensor:
        return self._fallback.attend(AttentionCall(call.query, call.key, call.value, call.scale))

    monkeypatch.setattr(dispatch.Dispatcher, "attend", everyone_sees_everyone)
    assert farthest(engine.forward(items).vectors, case.answers) > 1e-2


@pytest.mark.parametrize("backend", ["varlen", "sdpa"])
def test_captured(backend: str, case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device that records operators and replays them on fixed tensors, as a GPU does."""
    monkeypatch.setattr(proof, "SLOWER_THAN_EAGER", 1e9)
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", varlen)
    settings = case.settings(max_patches=64, preprocess="torch")
    tower = load_tower(find_checkpoint(str(case.folder)), settings)
    tower.module.to(torch.bfloat16)
    spec = tower.spec
    buckets = packed_buckets(spec.max_tokens, [1, 3], limit=256, multiple=spec.token_multiple, windows=spec.windows)
    decided = ResolvedBackend(backend, "server", "a test", backend_class(backend).capabilities)
    dispatcher = Dispatcher(decided)
    runner, eager = (kind(tower, dispatcher, CPU, torch.bfloat16) for kind in (Runner, EagerRunner))
    forward = BucketedForward(runner, eager, buckets)
    forward.prepare(tower.golden_items(), lambda message: None)
    assert [(record.state, record.reason) for record in forward.records] == [("ready", "")] * len(buckets)
    items = [tower.prepare(pixels) for pixels in case.pictures]  # type: ignore[attr-defined]
    assert tower.gather(items)["patches"].dtype == torch.uint8  # levels, which the graph normalises
    for members in (items, items[::-1], items[3:5], items[:1]):
        found = forward.run(members, tokens=True)
        assert found.runner == "cuda" and found.trace.reason is None
        again = forward._run_eager(members, tokens=True)[0]
        assert worst_cosine(found.vectors, again.vectors.numpy()) >= 0.9999
        assert again.tokens is not None
        features = np.concatenate(found.tokens)
        assert worst_cosine(features.reshape(1, -1), again.tokens.numpy().reshape(1, -1)) >= 0.9999


def test_the_cap_resizes_by_the_processors_own_rule(case: Case) -> None:
    engine = Engine.load(case.settings(max_patches=40, self_check=False))
    items = prepared(engine, [picture(500, 700), picture(40, 300)])
    lengths = [engine._tower.length_of(item) for item in items]
    assert max(lengths) <= 40 and min(lengths) > 20
    assert engine.info.fingerprint != case.engine().info.fingerprint


def test_budgets_of_the_cpu_stay_small(case: Case) -> None:
    engine = case.engine()
    budgets = [graph.bucket.tokens for graph in engine.report().graphs]
    assert max(budgets) <= 1024 and all(budget % engine._tower.spec.token_multiple == 0 for budget in budgets)


def test_golden_items_fit_every_budget_twice(case: Case) -> None:
    engine = case.engine()
    lengths = [engine._tower.length_of(item) for item in engine._golden]
    for graph in engine.report().graphs:
        assert sum(length <= graph.bucket.max_length for length in lengths) >= 2
    assert len(set(lengths)) >= 4
