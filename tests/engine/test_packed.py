"""A packed family from outside the project, served on the CPU: each item as if alone, and faults found at start."""

from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch

from encoder.attention import registry
from encoder.attention.backend import AttentionCall
from encoder.engine import Engine
from encoder.errors import SelfCheckFailed
from encoder.models import tower as towers
from encoder.settings import EngineSettings
from tests.engine import misbehaving
from tests.engine.misbehaving import GivesNan, GoodTwin, UniformAverage, WrongScale
from tests.support.packed_tower import FAMILY, alone, pictures, sharp_vit, write_packed

LENGTHS = [[5], [9, 7], [7, 9], [16] * 5, [1] * 9, [16, 3, 9, 11, 2]]


class Refuses(GoodTwin):
    """A kernel that takes less than its backend declares, as an older CANN does: it raises."""

    name: ClassVar[str] = "refuses"

    def attend(self, call: AttentionCall) -> torch.Tensor:
        raise RuntimeError("call aclnnFusedInferAttentionScoreV3 failed, error code is 561002: head_dim\nmore")


class IgnoresBoundaries(GoodTwin):
    """Everyone sees everyone."""

    name: ClassVar[str] = "ignores-boundaries"

    def spoilt(self, call: AttentionCall) -> AttentionCall:
        return AttentionCall(call.query, call.key, call.value, call.scale)


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(towers, "FAMILIES", {**towers.FAMILIES, **FAMILY})
    monkeypatch.setattr(registry, "BACKENDS", dict(registry.BACKENDS))
    for kind in (UniformAverage, GivesNan, WrongScale, GoodTwin):
        registry.register_backend(kind.name, f"{misbehaving.__name__}:{kind.__name__}")
    for kind in (Refuses, IgnoresBoundaries):
        registry.register_backend(kind.name, f"{__name__}:{kind.__name__}")
    return write_packed(tmp_path / "packed")


def load(folder: Path, **values: object) -> Engine:
    return Engine.load(
        EngineSettings.model_validate({"model": str(folder), "dtype": "float32", "buckets": [1, 4], **values})
    )


def as_alone(engine: Engine) -> bool:
    module = sharp_vit(80, 16)
    for lengths in LENGTHS:
        items = pictures(lengths, seed=sum(lengths))
        expected = np.stack([alone(module, item) for item in items])
        if np.abs(engine.forward(items).vectors - expected).max() > 1e-4:
            return False
    return True


@pytest.mark.parametrize("backend", ["sdpa", "reference", GoodTwin.name])
def test_each_item_is_as_alone(backend: str, folder: Path) -> None:
    engine = load(folder, runner="eager", attention_backend=backend)
    assert engine.resolved.name == backend and as_alone(engine)
    assert engine.info.mask_needs == ("segments",)


def test_openvino_takes_no_packed_batches_and_says_so(folder: Path) -> None:
    engine = load(folder, runner="auto")
    reasons = {(graph.runner, graph.state, graph.reason) for graph in engine.report().graphs}
    assert reasons == {("openvino", "eager", "graph runner openvino takes no packed batches")}
    assert engine.report().items_per_second > 0
    assert as_alone(engine) and engine.forward(pictures([3], seed=0)).runner == "eager"


@pytest.mark.parametrize("kind", [UniformAverage, GivesNan, WrongScale, IgnoresBoundaries, Refuses])
def test_a_wrong_backend_is_demoted_and_named(kind: type[GoodTwin], folder: Path) -> None:
    engine = load(folder, runner="eager", attention_backend=kind.name)
    report = engine.report()
    assert report.backend.name == "sdpa" and [name for name, _ in report.backend.rejected] == [kind.name]
    (why,) = (reason for _, reason in report.backend.rejected)
    assert report.notes == (f"attention backend {kind.name} was demoted: {why}",) and "\n" not in why
    error = "RuntimeError: call aclnnFusedInferAttentionScoreV3 failed, error code is 561002: head_dim: more"
    assert why == f"self-check failed: {error}" if kind is Refuses else "mask segments: cosine" in why
    assert as_alone(engine)


def test_when_the_last_backend_raises_the_engine_does_not_become_ready(folder: Path) -> None:
    registry.BACKENDS["sdpa"] = f"{__name__}:Refuses"
    with pytest.raises(SelfCheckFailed, match=r"no attention backend computes the right vectors: .*561002"):
        load(folder, runner="eager")
