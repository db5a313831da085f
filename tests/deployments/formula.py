"""An engine whose vectors are a formula, with the interface that serving asks of `encoder.engine.Engine`.

A picture's bytes name what happens to it: `bad…` cannot be decoded, `bug…` raises something unforeseen while decoding,
`poison…` fails in the forward, `nan…` gives a vector and features that are no numbers. All others give `vector_of` and
`features_of`.
"""

import threading
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from encoder.attention.backend import Capabilities, MaskNeed
from encoder.attention.resolve import ResolvedBackend
from encoder.device import Device
from encoder.engine import ForwardResult, RawPixels
from encoder.errors import EncoderError, InvalidImage, InvalidText
from encoder.preprocess.text import TokenizedText
from encoder.report import ModelInfo, Report

DIMENSIONS = 12
MAX_TOKENS = 8
MAX_BATCH = 4
GRID = (2, 3)
TOKEN_DIMENSIONS = 5


def vector_of(seed: int) -> np.ndarray:
    """float32 [12]; the first component is 3, so that no normalised vector equals an unnormalised one."""
    return np.array([3.0, *(np.sin(seed * (i + 1)) for i in range(DIMENSIONS - 1))], np.float32)


def features_of(seed: int) -> np.ndarray:
    """float32 [6, 5], of a grid of 2 rows and 3 columns; exact in float16."""
    return ((np.arange(30) * (seed % 7 + 1)) % 64 / 8).astype(np.float32).reshape(6, TOKEN_DIMENSIONS)


def seed_of(data: bytes) -> int:
    return sum(data) % 9973


@dataclass(frozen=True)
class Prepared:
    seed: int
    poison: bool = False
    nan: bool = False


class FormulaEngine:
    """`gate` holds forwards back while it is cleared; `batches` are the sizes of those that ran.

    `read_back`: of how many items each forward gave features.
    """

    def __init__(
        self, tower: str = "vision", fallback_reason: str | None = None, token_dimensions: int = TOKEN_DIMENSIONS
    ) -> None:
        self.info = ModelInfo(
            name="formula",
            revision="r1",
            family="clip",
            tower=tower,
            dimensions=DIMENSIONS,
            fingerprint="f00d",
            preprocessing={"mode": "formula"},
            mask_needs=("causal",) if tower == "text" else (),
            max_tokens=MAX_TOKENS if tower == "text" else 0,
            compute_dtype="float32",
            max_batch=MAX_BATCH,
            logit_scale=12.5,
            token_dimensions=token_dimensions if tower == "vision" else 0,
            token_features="by formula" if tower == "vision" and token_dimensions else "",
        )
        capabilities = Capabilities(frozenset({MaskNeed.CAUSAL}), frozenset({"float32", "bfloat16"}))
        self.resolved = ResolvedBackend("sdpa", "platform", "the only one", capabilities, (("fused", "no device"),))
        self.fallback_reason = fallback_reason
        self.counters: Counter[str] = Counter()
        self.batches: list[int] = []
        self.read_back: list[int] = []
        self.gate = threading.Event()
        self.gate.set()
        self.decode_gate = threading.Event()
        self.decode_gate.set()
        self.probe_error: Exception | None = None
        self.decodes = 0
        self.probes = 0
        self.closed = False
        self.lanes, self.lane_batch, self.takes_ahead = 1, MAX_BATCH, False
        self.shares = False

    def shares_processors(self, preparing: int) -> bool:
        return self.shares

    def prepare_image(self, source: bytes | RawPixels) -> Prepared:
        self.decodes += 1
        assert self.decode_gate.wait(20)
        data = source.data if isinstance(source, RawPixels) else source
        if isinstance(source, RawPixels) and len(data) != source.height * source.width * source.channels:
            raise InvalidImage("pixels do not fill the picture")
        if data.startswith(b"bad"):
            raise InvalidImage("the picture is\nbroken")
        if data.startswith(b"bug"):
            raise KeyError("secret detail")
        return Prepared(seed_of(data), data.startswith(b"poison"), data.startswith(b"nan"))

    def prepare_text(self, text: str, overflow: str) -> TokenizedText:
        words = [len(word) for word in text.split()]
        if len(words) > MAX_TOKENS and overflow == "refuse":
            raise InvalidText(f"{len(words)} tokens, the model takes {MAX_TOKENS}")
        return TokenizedText(words[:MAX_TOKENS], len(words), len(words) > MAX_TOKENS)

    def grid_of(self, item: Prepared) -> tuple[int, ...]:
        return GRID

    def plan_batch(self, items: Sequence[Prepared | TokenizedText]) -> Sequence[int]:
        return range(len(items))

    def forward(
        self, items: Sequence[Prepared | TokenizedText], *, tokens: bool = False, alone: bool = True
    ) -> ForwardResult:
        assert self.gate.wait(20)
        if any(isinstance(item, Prepared) and item.poison for item in items):
            raise EncoderError("the device refused this item")
        seeds = [item.seed if isinstance(item, Prepared) else sum(item.input_ids) for item in items]
        self.batches.append(len(items))
        vectors = np.stack([vector_of(seed) for seed in seeds])
        features = [features_of(seed) for seed in seeds] if tokens else []
        self.read_back.append(len(features))
        for place, item in enumerate(items):
            if isinstance(item, Prepared) and item.nan:
                vectors[place, 1] = np.nan
                for one in features[place : place + 1]:
                    one[3, 2] = np.nan
        return ForwardResult(vectors, self.resolved.name, "eager", self.fallback_reason, 1.0, features)

    def probe(self) -> None:
        assert self.gate.wait(20)
        self.probes += 1
        if self.probe_error is not None:
            raise self.probe_error

    def count(self, counter: str, amount: int = 1) -> None:
        self.counters[counter] += amount

    def report(self) -> Report:
        return Report(
            model=self.info,
            device=Device("cpu", 0, "formula cpu", "x86_64", 123456),
            versions={"python": "3"},
            backend=self.resolved,
            fallback="sdpa",
            graphs=(),
            self_checks=(),
            startup=(("load", 1.5),),
            items_per_second=7.0,
            counters=dict(self.counters),
            notes=("a note",),
        )

    def close(self) -> None:
        self.closed = True
