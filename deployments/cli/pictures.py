"""`vitfleet encode`: pictures into a file of vectors, with a progress bar, bad ones listed and good ones kept."""

import json
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from encoder.client import EncoderClient, EncodeResult
from encoder.errors import InvalidInput

SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif", ".mpo"}
FORMATS = (".npy", ".parquet")
SHOWN_ERRORS = 10


def run_encode(
    paths: Sequence[Path], out: Path, *, dtype: str, dimensions: int, address: str, model: str, pool: str
) -> None:
    """Exit code 0 when every picture has its vector, 1 when some have none (those that have one are written)."""
    if out.suffix not in FORMATS:
        raise InvalidInput(f"--out {out}: write to a name that ends in {' or '.join(FORMATS)}")
    if not out.parent.is_dir():
        raise InvalidInput(f"--out {out}: the folder {out.parent} does not exist: make it first")
    if out.suffix == ".parquet":
        _parquet()  # a missing package is told before any work is done
    pictures = list(find_pictures(paths))
    if not pictures:
        raise InvalidInput(f"no pictures in {', '.join(map(str, paths))}: looked for {', '.join(sorted(SUFFIXES))}")
    with _progress_bar() as bar, EncoderClient(address, model=model) as client:
        task = bar.add_task("encode", total=len(pictures))
        result = client.encode_images(
            pictures,
            dtype=dtype,  # type: ignore[call-overload]
            dimensions=dimensions,
            pool=pool,
            on_error="mask",
            progress=lambda done, total: bar.update(task, completed=done),
        )
    (write_npy if out.suffix == ".npy" else write_parquet)(out, pictures, result)
    _tell(out, pictures, result)
    if result.errors:
        raise SystemExit(1)


def find_pictures(paths: Iterable[Path]) -> Iterable[Path]:
    """Files as they are named, missing ones too (each fails by itself); of a folder all pictures in and below it."""
    for path in paths:
        if path.is_dir():
            yield from sorted(p for p in path.rglob("*") if p.is_file() and p.suffix.lower() in SUFFIXES)
        else:
            yield path


def write_npy(out: Path, pictures: Sequence[Path], result: EncodeResult) -> None:
    """Rows of the good pictures in order; beside it `<out>.json` says which picture each row is, and which failed."""
    good = [index for index in range(len(pictures)) if result.ok[index]]
    np.save(out, result.vectors[good])
    beside: dict[str, Any] = {
        "dtype": result.dtype,
        "dimensions": result.dimensions,
        "fingerprints": list(result.fingerprints),
        "rows": [str(pictures[index]) for index in good],
        "errors": {str(pictures[index]): error.message for index, error in result.errors.items()},
    }
    if result.scales is not None:
        beside["scales"] = [float(result.scales[index]) for index in good]
    out.with_name(out.name + ".json").write_text(json.dumps(beside, indent=1, ensure_ascii=False) + "\n")


def write_parquet(out: Path, pictures: Sequence[Path], result: EncodeResult) -> None:
    """One row a picture: path, vector (a list of fixed size, null for a failed one), scale for int8, error."""
    pyarrow, parquet = _parquet()
    width = result.vectors.shape[1]
    values = pyarrow.array(np.ascontiguousarray(result.vectors).reshape(-1))
    columns = {
        "path": pyarrow.array([str(path) for path in pictures]),
        "vector": pyarrow.FixedSizeListArray.from_arrays(values, width, mask=pyarrow.array(~result.ok)),
        "error": pyarrow.array(
            [result.errors[i].message if i in result.errors else None for i in range(len(pictures))], pyarrow.string()
        ),
    }
    if result.scales is not None:
        columns["scale"] = pyarrow.array(result.scales)
    notes = {"dtype": result.dtype, "dimensions": str(result.dimensions), "fingerprints": " ".join(result.fingerprints)}
    parquet.write_table(pyarrow.table(columns).replace_schema_metadata(notes), out)


def _parquet() -> tuple[Any, Any]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise InvalidInput("writing .parquet needs pyarrow: pip install 'vitfleet[bulk]', or write .npy") from None
    return pyarrow, pyarrow.parquet


def _progress_bar() -> Progress:
    return Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        console=Console(stderr=True),
        transient=True,
    )


def _tell(out: Path, pictures: Sequence[Path], result: EncodeResult) -> None:
    good = int(result.ok.sum())
    print(f"{good} of {len(pictures)} pictures: {result.dtype} vectors of {result.dimensions} dimensions in {out}")
    if out.suffix == ".npy":
        print(f"which picture each row is, and what failed: {out}.json")
    for index, error in list(result.errors.items())[:SHOWN_ERRORS]:
        print(f"  no vector: {pictures[index]}: {error.message}", file=sys.stderr)
    if len(result.errors) > SHOWN_ERRORS:
        print(f"  and {len(result.errors) - SHOWN_ERRORS} more: see {out}", file=sys.stderr)
