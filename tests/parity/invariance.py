"""The same vector whatever the batch, the neighbours, the bucket, the order, the second time."""

from collections.abc import Sequence

import numpy as np

from encoder.engine import Engine
from tests.parity.measure import distance

FLOAT32_ERROR = 1e-5
HALF_COSINE = 0.9999


def differing(engine: Engine, pictures: Sequence[bytes]) -> list[str]:
    """In which way vectors, or the features of a picture, depend on more than the picture; each a line."""
    items = [engine.prepare_image(data) for data in pictures]
    tokens = bool(engine.info.token_dimensions)
    together = engine.forward(items, tokens=tokens)
    wrong = [] if np.isfinite(together.vectors).all() else ["some are not finite"]
    if not np.array_equal(engine.forward(items).vectors, together.vectors):
        wrong.append("the second time, and without features, they are others")
    others = {
        "alone": np.concatenate([engine.forward([item]).vectors for item in items]),
        "in another order": engine.forward(items[::-1]).vectors[::-1],
        "in another bucket": engine.forward(items[:3]).vectors,
        "beside itself": engine.forward([items[0]] * 4).vectors[:1],
    }
    wrong += [_told(engine, how, found, together.vectors[: len(found)]) for how, found in others.items()]
    if tokens:
        alone = engine.forward(items[1:2], tokens=True).tokens[0]
        wrong.append(_told(engine, "features alone", alone, together.tokens[1]))
    return [line for line in wrong if line]


def _told(engine: Engine, how: str, found: np.ndarray, expected: np.ndarray) -> str:
    cosine, error = distance(found, expected)
    exact = engine.info.compute_dtype == "float32"
    held = error <= FLOAT32_ERROR if exact else cosine >= HALF_COSINE
    return "" if held else f"{how}: cosine {cosine:.7f}, error {error:.1e}"
