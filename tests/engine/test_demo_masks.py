"""The demo model tells at once when the text tower's mask is lost: its relations need word order."""

from collections.abc import Iterator

import numpy as np
import pytest

from encoder.attention import registry
from encoder.demo.evaluate import held_out_relations
from encoder.engine import Engine, RawPixels
from encoder.settings import EngineSettings
from tests.engine import misbehaving
from tests.engine.misbehaving import WRONG
from tests.support.checkpoints import unit

PICTURES = 120
SEED = 77


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(registry, "BACKENDS", dict(registry.BACKENDS))
    for name, kind in WRONG.items():
        registry.register_backend(name, f"{misbehaving.__name__}:{kind.__name__}")
    yield


def load(**values: object) -> Engine:
    return Engine.load(
        EngineSettings.model_validate({"dtype": "float32", "runner": "eager", "buckets": [32], **values})
    )


@pytest.fixture(scope="module")
def relations() -> tuple[np.ndarray, list[list[str]]]:
    """Vectors of held-out pictures [n, D] through the engine, and captions of the same words, the first one true."""
    pictures, captions = held_out_relations(PICTURES, SEED)
    vision = load()
    items = [
        vision.prepare_image(RawPixels(picture.convert("RGB").tobytes(), picture.height, picture.width, 3))
        for picture in pictures
    ]
    return unit(vision.forward(items).vectors), captions


def share_right(engine: Engine, relations: tuple[np.ndarray, list[list[str]]]) -> float:
    images, captions = relations
    texts = engine.forward([engine.prepare_text(text) for group in captions for text in group]).vectors
    scores = np.einsum("nd,nkd->nk", images, unit(texts).reshape(len(captions), -1, texts.shape[1]))
    return float((scores[:, 0] > scores[:, 1:].max(axis=1) + 1e-6).mean())


def test_relations_are_read_with_the_mask(relations: tuple[np.ndarray, list[list[str]]]) -> None:
    assert share_right(load(tower="text"), relations) >= 0.95


@pytest.mark.parametrize(("lost", "at_most"), [("ignores-causal", 0.80), ("drops-every-mask", 0.70)])
def test_a_lost_mask_ruins_them(lost: str, at_most: float, relations: tuple[np.ndarray, list[list[str]]]) -> None:
    broken = load(tower="text", attention_backend=lost, self_check=False)
    assert broken.report().backend.name == lost
    assert share_right(broken, relations) <= at_most
