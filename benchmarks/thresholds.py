"""What is asked of the figures, and whether they hold."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

Document = Mapping[str, Any]
BF16, INT8 = "vision bf16 openvino", "vision int8 openvino"


@dataclass(frozen=True)
class Threshold:
    """`value` reads the figure out of the document that `source` names; None when it was not measured."""

    what: str
    source: str
    value: Callable[[Document], float | None]
    bound: float
    at_least: bool = True
    unit: str = ""

    @property
    def asked(self) -> str:
        return f"{'≥' if self.at_least else '≤'} {self.bound:g}{self.unit}"

    def holds(self, value: float) -> bool:
        return value >= self.bound if self.at_least else value <= self.bound


@dataclass(frozen=True)
class Judged:
    """A threshold with what was measured; both None when it was not."""

    what: str
    asked: str
    measured: str | None
    passed: bool | None
    source: str


def figure(name: str) -> Callable[[Document], float | None]:
    """A figure that the script computed itself."""
    return lambda document: document.get("figures", {}).get(name)


def row_of(document: Document, **wanted: Any) -> Mapping[str, Any]:
    """The first row with these values; empty when there is none."""
    return next((row for row in document["rows"] if wanted.items() <= row.items()), {})


def cell(column: str, **wanted: Any) -> Callable[[Document], float | None]:
    """A cell of the first row with these values."""
    return lambda document: row_of(document, **wanted).get(column)


def int8_speedup(document: Document) -> float | None:
    """Rate of int8 over that of bf16 at batch 32."""
    rates = [row_of(document, engine=kind, batch=32).get("items/s") for kind in (INT8, BF16)]
    return None if None in rates else rates[0] / rates[1]  # type: ignore[operator]


def drift(document: Document) -> float | None:
    """Of memory, where 10,000 pictures were served."""
    figures = document.get("figures", {})
    return figures.get("RSS drift %") if figures.get("pictures", 0) >= 10_000 else None


def over_infinity(peer: str, settings: str = "") -> tuple[Threshold, ...]:
    """What is asked of the service beside infinity; its best setting is a dynamic int8 of its own."""
    asked = (
        ("images/s, bf16", "bf16", "images/s", 2.4, True),
        ("p50 of one client, bf16", "bf16", "p50 ms", 0.35, False),
        ("images/s, int8", "int8", "images/s", 4.0, True),
        ("texts/s", "bf16", "texts/s", 2.0, True),
    )
    name = f"over infinity{settings}"
    return tuple(
        Threshold(f"{what} over {peer}", "peers", figure(f"vitfleet {ours} {name} {column}"), bound, at_least, "×")
        for what, ours, column, bound, at_least in asked
    )


THRESHOLDS = (
    Threshold("engine bf16, batch 32, of the matrix rate", "engine", cell("of the limit", engine=BF16, batch=32), 0.95),
    Threshold("engine bf16, batch 1, of the matrix rate", "engine", cell("of the limit", engine=BF16, batch=1), 0.85),
    Threshold("engine int8 over bf16, batch 32", "engine", int8_speedup, 1.7, unit="×"),
    Threshold(
        "worst cosine of int8 to fp32 in its self-check", "engine", cell("worst self-check cosine", engine=INT8), 0.995
    ),
    Threshold(
        "service bf16, 32 clients × 1, over the bare engine", "serve", figure("bf16 service over bare engine"), 0.88
    ),
    Threshold(
        "service p50, one client, less the bare batch-1 forward",
        "serve",
        figure("bf16 p50 over bare batch-1 ms"),
        6.0,
        at_least=False,
        unit=" ms",
    ),
    *over_infinity("infinity at its best"),
    *over_infinity("infinity without int8", " in floats"),
    Threshold(
        "preprocessing `torch` over Pillow + transformers' PIL processor",
        "preprocess",
        cell("times", what="vitfleet torch"),
        3.5,
        unit="×",
    ),
    Threshold(
        "resident memory of the vision replica with its decode workers",
        "growth",
        figure("RSS MB"),
        1000.0,
        at_least=False,
        unit=" MB",
    ),
    Threshold("drift of that memory while 10,000 pictures are served", "growth", drift, 2.0, at_least=False, unit=" %"),
    Threshold(
        "replica ready, converted models kept", "start", figure("ready s, cached"), 12.0, at_least=False, unit=" s"
    ),
    Threshold(
        "router's addition to p50, one client", "router", figure("router overhead ms"), 1.5, at_least=False, unit=" ms"
    ),
    Threshold("requests of 100 KB through the router", "router", figure("router requests/s"), 800.0, unit="/s"),
)


def judge(documents: Mapping[str, Document]) -> list[Judged]:
    """Each threshold against the documents that there are; of another model than ViT-B/32 nothing is judged."""
    judged = []
    for threshold in THRESHOLDS:
        document = documents.get(threshold.source)
        value = threshold.value(document) if document is not None and not document.get("model") else None
        if value is None:
            judged.append(Judged(threshold.what, threshold.asked, None, None, threshold.source))
            continue
        digits = 4 if threshold.bound < 1 and threshold.bound > 0.99 else 2 if abs(value) < 100 else 0
        shown = f"{value:.{digits}f}{threshold.unit}"
        judged.append(Judged(threshold.what, threshold.asked, shown, threshold.holds(value), threshold.source))
    return judged
