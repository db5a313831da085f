"""CUDA graphs on a real GPU: whole engines, packed towers, wrong graphs, and what a failed capture leaves behind."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from encoder.engine import Engine, RawPixels
from encoder.graphs import proof, registry
from encoder.graphs.captured import Captured
from encoder.graphs.cuda import CudaGraphRunner
from encoder.graphs.runner import Bucket
from encoder.models import tower as towers
from encoder.models.tower import Inputs, TowerOutput
from encoder.settings import EngineSettings
from tests.support.checkpoints import worst_cosine
from tests.support.packed_tower import FAMILY, alone, pictures, sharp_vit, write_packed

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here"),
]


@pytest.fixture(autouse=True)
def any_speed_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "SLOWER_THAN_EAGER", 1e9)


@pytest.fixture
def packed_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(towers, "FAMILIES", {**towers.FAMILIES, **FAMILY})
    return write_packed(tmp_path / "packed")


def load(**values: object) -> Engine:
    return Engine.load(EngineSettings.model_validate({"device": "cuda", "buckets": [1, 4], **values}))


@pytest.mark.parametrize("tower", ["vision", "text"])
def test_the_demo_model(tower: str) -> None:
    engine = load(tower=tower)
    report = engine.report()
    assert report.backend.name in (("varlen", "flash_attn") if tower == "vision" else ("sdpa",))
    assert {(graph.runner, graph.state) for graph in report.graphs} == {("cuda", "ready")}
    assert all(check.passed for check in report.self_checks) and report.notes == ()
    on_cpu = Engine.load(EngineSettings.model_validate({"tower": tower, "dtype": "float32", "runner": "eager"}))
    assert worst_cosine(engine.golden_vectors(), on_cpu.golden_vectors()) >= 0.999
    eager = load(tower=tower, runner="eager")
    assert worst_cosine(engine.golden_vectors(), eager.golden_vectors()) >= 0.9999


@pytest.mark.parametrize("tower", ["vision", "text"])
def test_a_compiled_tower_is_captured(tower: str) -> None:
    engine, eager = load(tower=tower, runner="cuda-inductor"), load(tower=tower, runner="eager")
    assert {(graph.runner, graph.state) for graph in engine.report().graphs} == {("cuda-inductor", "ready")}
    assert worst_cosine(engine.golden_vectors(), eager.golden_vectors()) >= 0.9999


@pytest.mark.parametrize("backend", ["varlen", "sdpa"])
def test_a_packed_tower(backend: str, packed_folder: Path) -> None:
    engine = load(model=str(packed_folder), attention_backend=backend)
    assert [graph.state for graph in engine.report().graphs] == ["eager", "ready", "ready", "ready"]
    module = sharp_vit(80, 16)
    for lengths in ([5], [9, 7], [7, 9], [16, 16, 16, 16], [1, 1, 1], [16, 3, 9, 11, 2]):
        items = pictures(lengths, seed=sum(lengths))
        found = engine.forward(items)
        assert (found.runner, found.attention_backend, found.fallback_reason) == ("cuda", backend, None)
        assert worst_cosine(found.vectors, np.stack([alone(module, item) for item in items])) >= 0.999


def test_batches_that_are_given_ahead_get_their_own_vectors() -> None:
    engine, eager = load(tower="vision"), load(tower="vision", runner="eager")
    assert engine.takes_ahead and not eager.takes_ahead
    rng = np.random.default_rng(5)
    drawn = [rng.integers(0, 256, (64, 64, 3), dtype=np.uint8) for _ in range(16)]
    items = [engine.prepare_image(RawPixels(one.tobytes(), 64, 64, 3)) for one in drawn]
    asked = [items[start : start + count] for count in (4, 1, 4, 3) for start in range(0, 12, 2)] * 8
    with ThreadPoolExecutor(2) as threads:
        answers = list(threads.map(engine.forward, asked))
    for one, answer in zip(asked, answers, strict=True):
        assert answer.runner == "cuda" and worst_cosine(answer.vectors, eager.forward(one).vectors) >= 0.9999


class FreesBuffers(CudaGraphRunner):
    """Keeps copies in the place of the buffers that the graph reads."""

    def _capture(self, bucket: Bucket, inputs: Inputs) -> Captured:
        kept = super()._capture(bucket, inputs)
        copies = {name: tensor.clone() for name, tensor in kept.inputs.items()}
        return replace(kept, inputs=copies, segments={})


class ForgetsOneInput(CudaGraphRunner):
    def run(self, bucket: Bucket, inputs: Inputs, *, tokens: bool = False) -> Any:
        name = next(iter(inputs))
        forgotten = {**inputs, name: self._captured[bucket].inputs[name].cpu()}
        return super().run(bucket, forgotten, tokens=tokens)


class WaitsInside(CudaGraphRunner):
    """A forward that waits for the device cannot be captured."""

    def _capture(self, bucket: Bucket, inputs: Inputs) -> Captured:
        forward: Callable[[Inputs], TowerOutput] = self.tower.forward

        def waiting(given: Inputs) -> TowerOutput:
            vectors = forward(given).vectors
            return TowerOutput(vectors * (1.0 if float(vectors.sum()) else 2.0))

        self.tower.forward = waiting  # type: ignore[method-assign]
        try:
            return super()._capture(bucket, inputs)
        finally:
            self.tower.forward = forward  # type: ignore[method-assign]


@pytest.mark.parametrize(
    ("kind", "state", "reason"),
    [
        (FreesBuffers, "disabled", "replay "),
        (ForgetsOneInput, "disabled", "replay differs from eager"),
        (WaitsInside, "eager", "capture with attention backend "),
    ],
)
def test_graphs_that_are_wrong_are_found_out(
    kind: type[CudaGraphRunner], state: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "RUNNERS", {**registry.RUNNERS, "cuda": f"{__name__}:{kind.__name__}"})
    engine = load()
    assert {graph.state for graph in engine.report().graphs} == {state}
    assert all(graph.reason.startswith(reason) for graph in engine.report().graphs)
    assert torch.cuda.current_stream() == torch.cuda.default_stream()
    monkeypatch.undo()
    monkeypatch.setattr(proof, "SLOWER_THAN_EAGER", 1e9)
    right = load()
    assert {graph.state for graph in right.report().graphs} == {"ready"}
    assert worst_cosine(engine.golden_vectors(), right.golden_vectors()) >= 0.9999
