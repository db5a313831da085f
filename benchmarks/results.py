"""A benchmark's outcome: rows for the eye, JSON for the page and the plots."""

import argparse
import json
import math
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
WIDTH = 240
PACKAGES = ("torch", "transformers", "openvino", "ray", "grpcio", "numpy", "nncf")


def machine() -> dict[str, Any]:
    """What the figures were taken on, and how busy it was."""
    text = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    names = [line.split(":", 1)[1].strip() for line in text.splitlines() if line.startswith("model name")]
    flags = next((line for line in text.splitlines() if line.startswith("flags")), "")
    wanted = ("avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_int8")
    return {
        "processor": names[0] if names else platform.processor(),
        "cores": os.cpu_count(),
        "instructions": [flag for flag in wanted if f" {flag} " in flags + " "],
        "load": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "versions": {name: metadata.version(name) for name in PACKAGES if _installed(name)},
        "date": time.strftime("%Y-%m-%d"),
    }


def arguments_of(description: str | None) -> argparse.ArgumentParser:
    """A benchmark's command line, with what all of them take."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the JSON goes (docs/benchmarks)")
    return parser


def add_model(parser: argparse.ArgumentParser) -> None:
    """For benchmarks that start a fleet."""
    parser.add_argument("--model", help="serve this instead of ViT-B/32, such as `demo` to see whether all runs")


def publish(name: str, title: str, rows: Sequence[Mapping[str, Any]], *, folder: Path = FOLDER, **more: Any) -> Path:
    """Prints the rows as a table and writes NAME.json into the folder; a row's keys are the columns."""
    show(title, rows)
    return keep(name, title, rows, folder=folder, **more)


def show(title: str, rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the rows as a table."""
    table = Table(title=title)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(column, justify="right" if _numeric(rows, column) else "left")
    for row in rows:
        table.add_row(*(shown(row.get(column)) for column in columns))
    # In a file or a pipe a table would be squeezed into 80 columns.
    Console(width=None if sys.stdout.isatty() else WIDTH).print(table)
    sys.stdout.flush()


def keep(name: str, title: str, rows: Sequence[Mapping[str, Any]], *, folder: Path = FOLDER, **more: Any) -> Path:
    """Writes NAME.json; a script that takes minutes does so after each part."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    document = {"title": title, "machine": machine(), "rows": list(rows), **more}
    path.write_text(json.dumps(_plain(document), indent=1, ensure_ascii=False) + "\n")
    return path


def _plain(value: Any) -> Any:
    """JSON has no NaN: a figure that could not be computed is null."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def say(message: str) -> None:
    """One line of progress."""
    Console(stderr=True).print(message, style="dim", markup=False, highlight=False, soft_wrap=True)


def _numeric(rows: Sequence[Mapping[str, Any]], column: str) -> bool:
    return all(isinstance(row.get(column), int | float | None) for row in rows)


def shown(value: Any) -> str:
    """A cell."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.3f}" if abs(value) < 1 else f"{value:.1f}" if abs(value) < 1000 else f"{value:.0f}"
    return str(value)


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
