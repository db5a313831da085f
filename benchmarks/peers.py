"""vitfleet and its peers, side by side in one run: the same pictures and texts, the same checkpoint on this disk.

A server is asked by 32 clients and by one; a library runs in a loop, with batches of 32 and of one.
"""

import argparse
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.fleet import TEXT, VISION, Pool, fleet
from benchmarks.infinity import SETTINGS, http_vectors, serving
from benchmarks.page import KNOWN_PEERS
from benchmarks.peer_setup import PeerUnavailable, Recipe, install, recipes
from benchmarks.plan import ROOT, LoadFailed, Plan, carry_out
from benchmarks.results import add_model, arguments_of, keep, publish, say
from benchmarks.subjects import jpegs

TITLE = "Side by side, CLIP ViT-B/32, JPEG 640×480"
OURS = "vitfleet"


@dataclass
class Table:
    """Rows so far; kept in the folder after each peer."""

    options: argparse.Namespace
    rows: list[dict[str, Any]] = field(default_factory=list)
    reference: np.ndarray | None = None

    def add(self, who: str, setting: str, **values: Any) -> None:
        columns = dict.fromkeys(("images/s", "p50 ms", "texts/s", "worst cosine", "note"))
        self.rows.append({"who": who, "setting": setting} | columns | values)
        more = {"figures": figures_of(self.rows), "model": self.options.model}
        keep("peers", TITLE, self.rows, folder=self.options.folder, **more)

    def cosine(self, vectors: np.ndarray) -> float | None:
        """The worst one to transformers' float32 vectors of the same pictures."""
        if self.reference is None:
            return None
        unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
        return float((unit * self.reference[: len(unit)]).sum(axis=1).min())


def service(table: Table, base: Plan, text: Plan | None) -> dict[str, Any]:
    """The three figures of a service."""
    many = table.options.clients
    plans = [
        replace(base, name=f"{many} clients", clients=many),
        replace(base, name="1 client"),
        *([replace(text, name=f"texts, {many} clients", clients=many, kind="text")] if text else []),
    ]
    rows = list(carry_out(plans))
    errors = sum(row["errors"] for row in rows)
    note = f"{errors} errors: {next(row['first error'] for row in rows if row['errors'])}" if errors else None
    if silent := [row["load"] for row in rows if not row["answers"]]:
        note = f"no answer in time from {', '.join(silent)}{f'; {note}' if note else ''}"
    return {
        "images/s": rows[0]["items/s"],
        "p50 ms": rows[1]["p50 ms"],
        "texts/s": rows[2]["items/s"] if text else None,
        "note": note,
    }


def ours(table: Table, setting: str, engine: dict[str, Any], *, text: bool) -> None:
    """A fleet of ours, asked through its router."""
    from encoder.client import EncoderClient

    options = table.options
    pools = [Pool(engine=engine, model=options.model), *([Pool(name=TEXT, model=options.model)] if text else [])]
    with fleet(pools) as running:
        base = Plan("", running.router, seconds=options.seconds)
        values = service(table, base, base if text else None)
        with EncoderClient(running.router) as client:
            vectors = client.encode_images(jpegs(8), pool=VISION)
    same = table.cosine(vectors) if options.model is None else None
    table.add(OURS, setting, **values | {"worst cosine": same})


def loop(table: Table, library: str, dtype: str, folder: Path | None = None) -> None:
    """A library in a process of its own; raises PeerUnavailable."""
    with tempfile.TemporaryDirectory() as scratch:
        vectors = Path(scratch) / "vectors.npy"
        command = [sys.executable, "-m", "benchmarks.peer_loop", library, "--dtype", dtype, "--vectors", str(vectors)]
        command += ["--seconds", str(table.options.seconds), *(["--folder", str(folder)] if folder else [])]
        done = subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=600, env=os.environ | {"HF_HUB_OFFLINE": "1"}
        )
        if done.returncode != 0:
            raise PeerUnavailable((done.stderr.strip().splitlines() or ["it gave no reason"])[-1])
        found, made = json.loads(done.stdout.splitlines()[-1]), np.load(vectors)
    if library == "transformers" and dtype == "float32":
        table.reference = made
    columns = {"texts/s": found["texts/s"], "worst cosine": table.cosine(made)}
    table.add(library, f"{dtype}, batch 32 in a loop", **{"images/s": found["images/s 32"]} | columns)
    table.add(library, f"{dtype}, batch 1 in a loop", **{"images/s": found["images/s 1"], "p50 ms": found["p50 ms 1"]})


def sentence_transformers(table: Table, recipe: Recipe) -> None:
    """Both dtypes."""
    install(recipe)
    for dtype in ("float32", "bfloat16"):
        loop(table, recipe.name, dtype, recipe.folder)


def infinity(table: Table, recipe: Recipe) -> None:
    """Each of its settings on a server of its own; a setting that fails does not end the others."""
    install(recipe)
    for setting, arguments, warmup in SETTINGS[: table.options.settings]:
        say(f"infinity, {setting}")
        try:
            with serving(recipe, arguments) as address:
                base = Plan("", address, protocol="http", model="clip", seconds=table.options.seconds, warmup=warmup)
                values = service(table, base, base)
                values["worst cosine"] = table.cosine(http_vectors(address, jpegs(8)))
            table.add(recipe.name, f"{setting}, HTTP", **values)
        except (PeerUnavailable, LoadFailed, OSError) as error:
            table.add(recipe.name, f"{setting}, HTTP", note=f"not measured: {error}")


def clip_as_service(table: Table, recipe: Recipe) -> None:
    """Its row: clip_server/model/clip_model.py of 0.8.3 takes a name out of three lists, and no folder."""
    own = "it loads only the checkpoints that it names itself, so not this one"
    try:
        install(recipe)
    except PeerUnavailable as error:
        raise PeerUnavailable(f"{error}; {own}") from None
    raise PeerUnavailable(own)


def figures_of(rows: Sequence[dict[str, Any]]) -> dict[str, float]:
    """The best of each peer over its settings, with int8 and without, and ours over it."""
    best: dict[tuple[str, str], float] = {}
    for who in dict.fromkeys(row["who"] for row in rows if row["who"] != OURS):
        settings = [row for row in rows if row["who"] == who]
        floats = [row for row in settings if "int8" not in row["setting"]]
        for column, choose in (("images/s", max), ("p50 ms", min), ("texts/s", max)):
            for name, those in ((who, settings), (f"{who} in floats", floats)):
                if values := [row[column] for row in those if _known(row[column])]:
                    best[name, column] = choose(values)
    figures = {f"{who} {column}": value for (who, column), value in best.items()}
    for mine in (row for row in rows if row["who"] == OURS):
        for (who, column), value in best.items():
            if _known(mine[column]):
                figures[f"{OURS} {mine['setting']} over {who} {column}"] = mine[column] / value
    return figures


def attempt(table: Table, who: str, run: Callable[[], None]) -> None:
    """A peer that fails has a row which says why."""
    say(who)
    try:
        run()
    except Exception as error:
        reason = " ".join(str(error).split())[:300]
        kind = "not measured" if isinstance(error, PeerUnavailable) else f"failed, {type(error).__name__}"
        say(f"  {kind}: {reason}")
        table.add(who, "", note=f"{kind}: {reason}")


def main() -> None:
    """Prints and writes peers.json."""
    parser = arguments_of(__doc__)
    known = [*KNOWN_PEERS, OURS]
    parser.add_argument("--only", nargs="+", default=known, choices=known, help="leave the others out")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--settings", type=int, default=len(SETTINGS), help="of infinity, the first so many")
    parser.add_argument("--seconds", type=float, default=8.0, help="for each figure")
    add_model(parser)
    options = parser.parse_args()
    table, made = Table(options), recipes()
    steps: dict[str, Sequence[Callable[[], None]]] = {
        "transformers": [
            lambda: loop(table, "transformers", "float32"),
            lambda: loop(table, "transformers", "bfloat16"),
        ],
        "sentence-transformers": [lambda: sentence_transformers(table, made["sentence-transformers"])],
        "infinity": [lambda: infinity(table, made["infinity"])],
        "clip-as-service": [lambda: clip_as_service(table, made["clip-as-service"])],
        "vitfleet": [
            lambda: ours(table, "bf16", {}, text=True),
            lambda: ours(table, "bf16, 2 lanes", {"lanes": 2}, text=False),
            lambda: ours(table, "int8", {"quantization": "int8"}, text=False),
        ],
    }
    for who in options.only:
        for step in steps[who]:
            attempt(table, who, step)
    versions = {name: recipe.version() for name, recipe in made.items() if (recipe.folder / ".ready").exists()}
    more = {"figures": figures_of(table.rows), "model": options.model, "peers": versions}
    publish("peers", TITLE, table.rows, folder=options.folder, **more)


def _known(value: float | None) -> bool:
    return value is not None and not math.isnan(value)


if __name__ == "__main__":
    main()
