"""Runs engines over pictures and keeps what they give; also as a script, on a machine that is not this process's.

python -m tests.parity.encode JOBS.json     # a list of {"settings", "pictures", "out"}
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from encoder.engine import Engine
from encoder.graphs import proof
from encoder.settings import EngineSettings


@dataclass(frozen=True)
class Found:
    """What an engine gave: vectors [n, D], features [t, F] of each picture, and how they were computed.

    `runner`: the one that ran. `backend`: of attention. `fallback`: why calls fell back, or empty. `refused`: graphs
    that were not captured, with their reasons.
    """

    vectors: np.ndarray
    features: list[np.ndarray]
    runner: str
    backend: str
    fallback: str
    refused: str


def hushed() -> None:
    """Turns off what transformers tells of the seeded checkpoints: loading bars, weights of the other tower."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def open_engine(settings: dict[str, Any]) -> Engine:
    """An engine that uses a graph however slow it is here: what is asked for is what is measured."""
    proof.SLOWER_THAN_EAGER = 1e9
    return Engine.load(EngineSettings.model_validate(settings))


def encode(engine: Engine, pictures: Sequence[bytes]) -> Found:
    """Every picture through the engine, from its bytes on."""
    items = [engine.prepare_image(data) for data in pictures]
    found = engine.forward(items, tokens=bool(engine.info.token_dimensions))
    refused = [f"{graph.bucket}: {graph.reason}" for graph in engine.report().graphs if graph.state != "ready"]
    reasons = "; ".join(refused) if found.runner != "eager" else ""
    return Found(
        found.vectors, found.tokens, found.runner, found.attention_backend, found.fallback_reason or "", reasons
    )


def save_pictures(path: Path, pictures: Sequence[bytes]) -> None:
    np.savez(path, *[np.frombuffer(data, np.uint8) for data in pictures])


def load_pictures(path: Path) -> list[bytes]:
    with np.load(path) as saved:
        return [saved[name].tobytes() for name in saved.files]


def save_found(path: Path, found: Found) -> None:
    named = {f"features_{index}": features for index, features in enumerate(found.features)}
    told = json.dumps([found.runner, found.backend, found.fallback, found.refused])
    np.savez(path, vectors=found.vectors, told=np.array(told), **named)  # type: ignore[arg-type]


def load_found(path: Path) -> Found:
    with np.load(path) as saved:
        count = sum(name.startswith("features_") for name in saved.files)
        features = [saved[f"features_{index}"] for index in range(count)]
        return Found(saved["vectors"], features, *json.loads(str(saved["told"])))


def main(path: str) -> None:
    """Runs the jobs of a file one after the other; a job that fails leaves its reason beside its output."""
    for job in json.loads(Path(path).read_text()):
        out = Path(job["out"])
        try:
            engine = open_engine(job["settings"])
            save_found(out, encode(engine, load_pictures(Path(job["pictures"]))))
            engine.close()
        except Exception as error:
            out.with_suffix(".error").write_text(f"{type(error).__name__}: {' '.join(str(error).split())}")


if __name__ == "__main__":
    main(sys.argv[1])
