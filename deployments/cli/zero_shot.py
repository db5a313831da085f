"""Zero-shot classification: which of some labels fits a picture best."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from rich.table import Table

from deployments.cli.show import console
from encoder.client import EncoderClient
from encoder.errors import InvalidInput

# What CLIP's training caps its own scale at; used for a model that has learned none.
DEFAULT_LOGIT_SCALE = 100.0


def run_classify(picture: Path, labels: Sequence[str], *, address: str, model: str) -> None:
    """`vitfleet classify`."""
    if len(set(labels)) < 2:
        raise InvalidInput("classify needs two labels or more: --labels 'a red circle' 'a blue square'")
    with EncoderClient(address, model=model) as client:
        encoded = client.encode_images([picture], on_error="mask")
        if encoded.errors:
            first = "" if picture.is_file() else ": name the picture first, then --labels"
            raise InvalidInput(f"{picture}: {encoded.errors[0].message}{first}")
        images = np.asarray(encoded.vectors, np.float32)
        texts = np.asarray(client.encode_text(list(labels)), np.float32)
        scale = logit_scale(client, model)
    chances = probabilities(images, texts, scale)[0]
    table = Table("label", "probability")
    for index in np.argsort(-chances):
        table.add_row(labels[int(index)], f"{chances[index]:.1%}")
    to = console()
    to.print(str(picture), soft_wrap=True)
    to.print(table)


def logit_scale(client: EncoderClient, model: str = "") -> float:
    """What the served model multiplies cosines by."""
    learned = [tower.logit_scale for tower in client.get_model(model).towers if tower.logit_scale]
    return learned[0] if learned else DEFAULT_LOGIT_SCALE


def probabilities(images: np.ndarray, texts: np.ndarray, scale: float) -> np.ndarray:
    """[pictures, labels] from vectors of length 1: softmax(scale * cosine) over the labels."""
    logits = scale * (images.astype(np.float64) @ texts.astype(np.float64).T)
    weights = np.exp(logits - logits.max(axis=1, keepdims=True))
    chances: np.ndarray = weights / weights.sum(axis=1, keepdims=True)
    return chances
