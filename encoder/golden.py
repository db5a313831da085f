"""Golden inputs made by formula: the same on every machine, so the vectors of a fleet can be held together."""

import numpy as np

GOLDEN_TEXTS = (
    "a red circle",
    "a blue square left of a green triangle",
    "two yellow stars above a purple cross on a noisy background, drawn large",
    "",
)


def golden_texts() -> tuple[str, ...]:
    """Texts of different lengths, one of them empty, so that a batch of them needs padding."""
    return GOLDEN_TEXTS


def golden_pictures(height: int, width: int) -> list[np.ndarray]:
    """Four pictures uint8 [3, height, width]: a gradient, a disc, waves, and blocks of scrambled colours."""
    y, x = np.mgrid[0:height, 0:width].astype(np.float64)
    u, v = x / max(width - 1, 1), y / max(height - 1, 1)
    gradient = np.stack([u, v, 1 - u])
    inside = (u - 0.6) ** 2 + (v - 0.4) ** 2 < 0.06
    disc = np.stack([np.where(inside, 0.9, 0.2), np.where(inside, 0.1, 0.5), np.where(inside, 0.1, 0.8)])
    waves = np.stack([0.5 + 0.5 * np.sin(a * u + b * v) for a, b in ((9, 2), (3, 14), (17, 11))])
    block = (np.floor(u * 7.999) * 31 + np.floor(v * 7.999) * 57).astype(np.int64)
    scrambled = np.stack([((block * factor + 13) % 251) / 250 for factor in (97, 151, 211)])
    return [np.rint(picture * 255).astype(np.uint8) for picture in (gradient, disc, waves, scrambled)]
