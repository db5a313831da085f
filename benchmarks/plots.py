"""Plots of the documents, as PNG."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
from matplotlib import pyplot  # the backend is chosen first
from matplotlib.axes import Axes
from matplotlib.ticker import FormatStrFormatter, NullLocator

Document = Mapping[str, Any]
COLOURS = ("#2a78d6", "#e07b39", "#2f9e6e", "#8a5fbf", "#c2456b", "#6b7280")
GRID, INK = "#d9dde3", "#333a44"


def engine(document: Document, path: Path) -> None:
    """Items a second by batch, a line an engine."""
    with figure(path, 1) as (axes,):
        rows = document["rows"]
        for colour, kind in zip(_colours(), dict.fromkeys(row["engine"] for row in rows), strict=False):
            own = [row for row in rows if row["engine"] == kind]
            line(axes, [row["batch"] for row in own], [row["items/s"] for row in own], kind, colour)
        batches = sorted({row["batch"] for row in rows})
        dress(axes, "items/s by batch", "images or texts in a batch", "items/s", log=True, ticks=batches)
        axes.legend(frameon=False)


def preprocess(document: Document, path: Path) -> None:
    """Pictures a second, a bar each."""
    with figure(path, 1) as (axes,):
        bars(axes, [row["what"] for row in document["rows"]], [row["pictures/s"] for row in document["rows"]])
        dress(axes, "JPEG to pixels", "pictures/s", "")


def serve(document: Document, path: Path) -> None:
    """Latency of each load through the router, and whose processor time it was."""
    rows = [row for row in document["rows"] if row["way"] == "router"]
    names = [f"{row['engine']}, {row['load']}" for row in rows]
    with figure(path, 2) as (left, right):
        for colour, share in zip(_colours(), ("p50 ms", "p95 ms", "p99 ms"), strict=False):
            left.scatter(
                [row[share] for row in rows], range(len(rows)), color=colour, label=share.removesuffix(" ms"), zorder=3
            )
        left.set_yticks(range(len(rows)), names)
        left.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=3, fontsize=8)
        dress(left, "Latency through the router", "ms", "", log=True)
        offset = [0.0] * len(rows)
        for colour, role in zip(_colours(), ("replica", "client", "router", "haproxy", "ray"), strict=False):
            values = [row.get(f"{role} cores") or 0.0 for row in rows]
            right.barh(range(len(rows)), values, left=offset, color=colour, label=role, height=0.6)
            offset = [start + value for start, value in zip(offset, values, strict=True)]
        right.set_yticks(range(len(rows)), [""] * len(rows))
        for axes in (left, right):
            axes.set_ylim(len(rows) - 0.5, -0.5)
        right.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.14), ncols=5, fontsize=8)
        dress(right, "Processor time", "cores", "")


def growth(document: Document, path: Path) -> None:
    """Items a second along each axis."""
    names = list(dict.fromkeys(row["axis"] for row in document["rows"]))
    with figure(path, max(1, len(names))) as panels:
        for axes, name in zip(panels, names, strict=False):
            own = [row for row in document["rows"] if row["axis"] == name]
            line(axes, [row["value"] for row in own], [row["items/s"] for row in own], "", COLOURS[0])
            dress(axes, "", name, "items/s", log=True, ticks=[row["value"] for row in own])
            axes.set_ylim(bottom=0)


def memory(document: Document, path: Path) -> None:
    """Resident memory over the pictures served."""
    with figure(path, 1) as (axes,):
        samples = document.get("memory", [])
        line(axes, [s["pictures"] for s in samples], [s["RSS MB"] for s in samples], "", COLOURS[0])
        dress(axes, "Resident memory of the replica with its decode workers", "pictures served", "MB")
        axes.set_ylim(bottom=0)


def peers(document: Document, path: Path) -> None:
    """Images a second and p50, a bar each."""
    rows = [row for row in document["rows"] if row["images/s"] is not None]
    names = [f"{row['who']}: {row['setting']}" for row in rows]
    own = [COLOURS[0] if row["who"] == "vitfleet" else COLOURS[5] for row in rows]
    with figure(path, 2) as (left, right):
        bars(left, names, [row["images/s"] for row in rows], own)
        dress(left, "images/s, 32 clients or batch 32 (else as named)", "images/s", "")
        bars(right, names, [row["p50 ms"] for row in rows], own)
        right.set_yticklabels([])
        dress(right, "p50, one client or batch 1", "ms", "")


def start(document: Document, path: Path) -> None:
    """Stages of each start."""
    rows = document["rows"]
    stages = [name for name in rows[0] if name.endswith(" s") and not name.startswith(("replica", "Ray", "fleet"))]
    with figure(path, 1) as (axes,):
        offset = [0.0] * len(rows)
        for colour, stage in zip(_colours() * 2, stages, strict=False):
            values = [row.get(stage) or 0.0 for row in rows]
            axes.barh([row["cache"] for row in rows], values, left=offset, color=colour, label=stage, height=0.5)
            offset = [begun + value for begun, value in zip(offset, values, strict=True)]
        axes.invert_yaxis()
        axes.legend(frameon=False, loc="upper center", bbox_to_anchor=(0.5, -0.16), ncols=3, fontsize=8)
        dress(axes, "A replica's own stages by what is kept on disk", "s", "")


PLOTS: Mapping[str, Mapping[str, Callable[[Document, Path], None]]] = {
    "engine": {"engine": engine},
    "preprocess": {"preprocess": preprocess},
    "serve": {"serve": serve},
    "peers": {"peers": peers},
    "growth": {"growth": growth, "memory": memory},
    "start": {"start": start},
}


class figure:  # noqa: N801  # used as a block: with figure(path, panels) as axes
    """A row of panels that is written when the block ends."""

    def __init__(self, path: Path, panels: int) -> None:
        self._path = path
        self._figure, axes = pyplot.subplots(1, panels, figsize=(7.0 if panels == 1 else 5.5 * panels, 4.2))
        self._axes: Sequence[Axes] = [axes] if panels == 1 else list(axes)

    def __enter__(self) -> Sequence[Axes]:
        return self._axes

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            self._figure.savefig(self._path, dpi=110, bbox_inches="tight")
        pyplot.close(self._figure)


def line(axes: Axes, x: Sequence[float], y: Sequence[float], label: str, colour: str) -> None:
    """Points joined by a line."""
    axes.plot(x, y, color=colour, label=label, linewidth=2, marker="o", markersize=5)


def bars(
    axes: Axes, names: Sequence[str], values: Sequence[float | None], colours: Sequence[str] | str = COLOURS[0]
) -> None:
    """Bars that lie, each with its number, the first one on top; without a value there is none."""
    drawn = axes.barh(range(len(names)), [value or 0.0 for value in values], color=colours, height=0.6)
    axes.set_yticks(range(len(names)), names)
    axes.bar_label(
        drawn, ["" if value is None else f"{value:.1f}" for value in values], padding=3, fontsize=8, color=INK
    )
    axes.margins(x=0.12)
    axes.invert_yaxis()


def dress(axes: Axes, title: str, x: str, y: str, *, log: bool = False, ticks: Sequence[float] = ()) -> None:
    """Titles, a quiet grid, and a logarithmic x where asked for, marked at `ticks` when there are some."""
    axes.set_title(title, fontsize=10, color=INK, loc="left")
    axes.set_xlabel(x, color=INK)
    axes.set_ylabel(y, color=INK)
    if log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(FormatStrFormatter("%.3g"))
        axes.xaxis.set_minor_locator(NullLocator())
    if ticks:
        axes.set_xticks(list(ticks))
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(colors=INK, labelsize=8)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)


def _colours() -> list[str]:
    return list(COLOURS)
