"""The start-up proof catches what public reports of silently wrong attention describe, and demotes."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch

from deployments.router.metrics import DEMOTED_REASON
from encoder.attention import registry
from encoder.attention.backend import MaskNeed
from encoder.attention.dispatch import Dispatcher
from encoder.attention.resolve import ResolvedBackend
from encoder.engine import Engine
from encoder.errors import SelfCheckFailed
from encoder.selfcheck import check_attention, compare_rows
from encoder.settings import EngineSettings
from tests.engine import misbehaving
from tests.engine.misbehaving import WRONG, GoodTwin

# Which towers of the demo model cannot but notice: a vision call has no mask to lose.
CAUGHT = [
    ("drops-mask", "text"),
    ("ignores-causal", "text"),
    ("drops-every-mask", "text"),
    ("wrong-scale", "vision"),
    ("wrong-scale", "text"),
    ("mask-ignored-past-512", "text"),
    ("uniform-average", "vision"),
    ("uniform-average", "text"),
    ("gives-nan", "vision"),
    ("gives-nan", "text"),
]


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "BACKENDS", dict(registry.BACKENDS))
    for name, kind in {**WRONG, GoodTwin.name: GoodTwin}.items():
        registry.register_backend(name, f"{misbehaving.__name__}:{kind.__name__}")
    yield


def load(**values: object) -> Engine:
    return Engine.load(EngineSettings.model_validate({"dtype": "float32", "runner": "eager", "buckets": [4], **values}))


@pytest.mark.parametrize(("name", "tower"), CAUGHT)
def test_a_wrong_backend_is_demoted_and_named(name: str, tower: str) -> None:
    engine = load(tower=tower, attention_backend=name)
    report = engine.report()
    assert report.backend.name == "sdpa"
    assert report.backend.rejected[0][0] == name
    # The router counts demoted replicas by this beginning.
    assert report.backend.rejected[0][1].startswith(DEMOTED_REASON)
    assert any(name in note and "demoted" in note for note in report.notes)
    honest = load(tower=tower).golden_vectors()
    assert np.array_equal(engine.golden_vectors(), honest)


@pytest.mark.parametrize("tower", ["vision", "text"])
def test_a_right_backend_from_outside_serves(tower: str) -> None:
    engine = load(tower=tower, attention_backend=GoodTwin.name)
    assert engine.report().backend.name == GoodTwin.name and engine.report().notes == ()
    assert np.abs(engine.golden_vectors() - load(tower=tower).golden_vectors()).max() <= 1e-4


def test_when_the_last_backend_is_wrong_the_engine_does_not_become_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    registry.BACKENDS["sdpa"] = f"{misbehaving.__name__}:DropsMask"
    with pytest.raises(SelfCheckFailed, match="no attention backend computes the right vectors"):
        load(tower="text")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("head_dim", [64, 72, 80, 88, 128])
@pytest.mark.parametrize("need", list(MaskNeed))
def test_the_attention_check_passes_what_is_right_and_fails_what_is_wrong(
    need: MaskNeed, head_dim: int, dtype: torch.dtype
) -> None:
    def checked(name: str) -> bool:
        decided = ResolvedBackend(name, "server", "a test", registry.backend_class(name).capabilities)
        return check_attention(
            Dispatcher(decided), device="cpu", dtype=dtype, head_dim=head_dim, need=need, tower="text"
        ).passed

    assert checked("sdpa") and checked("reference")
    assert not checked("uniform-average") and not checked("gives-nan")
    assert checked("wrong-scale") is (head_dim == 128)
    masked_by_tensor = need in (MaskNeed.KEY_PADDING, MaskNeed.ADDITIVE)
    assert checked("drops-mask") is not masked_by_tensor
    assert checked("mask-ignored-past-512") is not masked_by_tensor
    assert checked("ignores-causal") is (need is not MaskNeed.CAUSAL)


def test_nan_never_passes() -> None:
    good = np.ones((2, 3), np.float32)
    bad = good.copy()
    bad[1, 1] = np.nan
    cosine, error = compare_rows(bad, good)
    assert not cosine >= 0.0 and not error <= 1e9


def test_compare_rows_by_hand() -> None:
    cosine, error = compare_rows(np.array([[1.0, 0.0], [0.0, 0.0]]), np.array([[1.0, 1.0], [0.0, 0.0]]))
    assert cosine == pytest.approx(1 / np.sqrt(2)) and error == 1.0
