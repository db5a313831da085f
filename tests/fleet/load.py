"""Load on a fleet by the project's own client, each answer held against the engine's own vectors."""

import random
import threading
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from encoder.client import EncoderClient, RetryPolicy
from encoder.demo import demo_model_path
from encoder.engine import Engine
from encoder.settings import EngineSettings
from tests.fleet.machine import ENGINE

# What the client may take for a call with all its retries. Replicas come back well within it.
DEADLINE_S = 400.0
PATIENT = RetryPolicy(retries=10_000, first_delay=0.1, longest_delay=1.0)
TEXTS = ["a red circle", "two blue squares left of a green triangle", "an orange heart"]
ATOL = 2e-5


def pictures() -> list[bytes]:
    """The demo's pictures, as files."""
    folder = demo_model_path().parent / "pictures"
    return [path.read_bytes() for path in sorted(folder.iterdir()) if path.suffix != ".json"]


@dataclass(frozen=True)
class Oracle:
    """Vectors of the engine itself, without a fleet: float32 [n, D] each."""

    images: np.ndarray
    texts: np.ndarray

    @classmethod
    def compute(cls) -> "Oracle":
        vision = Engine.load(EngineSettings.model_validate({**ENGINE, "tower": "vision"}))
        text = Engine.load(EngineSettings.model_validate({**ENGINE, "tower": "text"}))
        return cls(
            _vectors(vision, map(vision.prepare_image, pictures())), _vectors(text, map(text.prepare_text, TEXTS))
        )


def _vectors(engine: Engine, items: Iterable[Any]) -> np.ndarray:
    """One by one, of length 1."""
    found = np.concatenate([engine.forward([item]).vectors for item in items])
    return found / np.linalg.norm(found, axis=1, keepdims=True)


@dataclass
class Tally:
    """What came of a load: items with right vectors, items with wrong ones, errors."""

    right: Counter[str] = field(default_factory=Counter)
    wrong: int = 0
    errors: list[str] = field(default_factory=list)


class Load:
    """Callers that send one batch after the other to a router, until they are stopped or have sent enough."""

    def __init__(self, router: str, oracle: Oracle) -> None:
        self._router = router
        self._oracle = oracle
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self.tally = Tally()

    @contextmanager
    def running(self, callers: int = 2) -> Iterator[Tally]:
        """Pictures from `callers` and texts from one more, while the block runs; fails when a call does."""
        threads = [threading.Thread(target=self._until_stopped, args=("images",)) for _ in range(callers)]
        threads.append(threading.Thread(target=self._until_stopped, args=("texts",)))
        for thread in threads:
            thread.start()
        try:
            yield self.tally
        finally:
            self._stop.set()
            for thread in threads:
                thread.join()
        assert self.tally.errors == [] and self.tally.wrong == 0
        assert self.tally.right["images"] > 0 and self.tally.right["texts"] > 0

    def send_pictures(self, count: int, batch: int, callers: int) -> Tally:
        """`count` pictures in batches, and then the end."""
        files = pictures()
        starts = iter(range(0, count, batch))

        def send() -> None:
            with EncoderClient(self._router, timeout=DEADLINE_S, retries=PATIENT, batch_size=batch) as client:
                while True:
                    with self._lock:
                        first = next(starts, None)
                    if first is None:
                        return
                    # No two batches alike: a router refuses for a while what two replicas were lost under.
                    chance = random.Random(first)
                    numbers = [chance.randrange(len(files)) for _ in range(first, min(first + batch, count))]
                    self._batch(client, "images", numbers)

        threads = [threading.Thread(target=send) for _ in range(callers)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        return self.tally

    def _until_stopped(self, kind: str) -> None:
        size = len(self._oracle.images if kind == "images" else self._oracle.texts)
        with EncoderClient(self._router, timeout=DEADLINE_S, retries=PATIENT) as client:
            while not self._stop.is_set():
                self._batch(client, kind, list(range(size)))
                self._stop.wait(0.02)

    def _batch(self, client: EncoderClient, kind: str, numbers: list[int]) -> None:
        try:
            if kind == "images":
                files, expected = pictures(), self._oracle.images[numbers]
                found = client.encode_images([files[n] for n in numbers])
            else:
                expected = self._oracle.texts[numbers]
                found = client.encode_text([TEXTS[n] for n in numbers])
        except Exception as error:
            with self._lock:
                self.tally.errors.append(f"{type(error).__name__}: {error}")
            return
        right = int((np.abs(found - expected).max(axis=1) <= ATOL).sum())
        with self._lock:
            self.tally.right[kind] += right
            self.tally.wrong += len(numbers) - right
