"""A benchmark's outcome: rows for the eye, JSON for the page and the plots."""

import json
import os
import platform
import time
from collections.abc import Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

FOLDER = Path(__file__).resolve().parents[1] / "docs" / "benchmarks"
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


def publish(name: str, title: str, rows: Sequence[Mapping[str, Any]], **more: Any) -> Path:
    """Prints the rows as a table and writes docs/benchmarks/NAME.json; a row's keys are the columns."""
    table = Table(title=title)
    columns = list(dict.fromkeys(key for row in rows for key in row))
    for column in columns:
        table.add_column(column, justify="right" if _numeric(rows, column) else "left")
    for row in rows:
        table.add_row(*(_shown(row.get(column)) for column in columns))
    Console().print(table)
    FOLDER.mkdir(parents=True, exist_ok=True)
    path = FOLDER / f"{name}.json"
    path.write_text(json.dumps({"title": title, "machine": machine(), "rows": list(rows), **more}, indent=1) + "\n")
    return path


def say(message: str) -> None:
    """One line of progress."""
    Console(stderr=True).print(f"[dim]{message}[/dim]", highlight=False)


def _numeric(rows: Sequence[Mapping[str, Any]], column: str) -> bool:
    return all(isinstance(row.get(column), int | float | None) for row in rows)


def _shown(value: Any) -> str:
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
