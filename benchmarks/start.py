"""How long a start takes: a fleet with no converted model on disk, then with them kept from the start before."""

import shutil
from pathlib import Path
from typing import Any

from benchmarks.fleet import VISION, Pool, Running, fleet
from benchmarks.results import add_model, arguments_of, keep, publish, say
from benchmarks.subjects import FOLDER as SCRATCH

TITLE = "From start to ready, CLIP ViT-B/32, bf16, six buckets"
CACHE = SCRATCH / "start-cache"
BUCKETS = (1, 2, 4, 8, 16, 32)


def row_of(running: Running, cache: str) -> dict[str, Any]:
    """Seconds: of the fleet, of the replica from its process on, and of the replica's own stages."""
    told = [event for event in running.events if event.pool == VISION]
    begun = next(event.seconds for event in told if not event.replica)
    ready = next(event.seconds for event in told if event.message == "ready")
    up = next(event.seconds for event in running.events if event.stage == "ready")
    report = running.reports[VISION][0]
    stages = {f"{stage.name} s": stage.milliseconds / 1e3 for stage in report.startup}
    return {
        "cache": cache,
        "replica ready s": ready - begun,
        "Ray and Serve up s": begun,
        "fleet answers s": up,
        **stages,
        "cache MB": sum(file.stat().st_size for file in CACHE.rglob("*") if file.is_file()) / 1e6,
    }


def measure(cache: str, model: str | None) -> dict[str, Any]:
    """One start."""
    with fleet([Pool(engine={"buckets": list(BUCKETS), "cache_dir": str(CACHE)}, model=model)]) as running:
        row = row_of(running, cache)
    say(f"  {cache}: replica ready after {row['replica ready s']:.1f} s")
    return row


def main() -> None:
    """Prints and writes start.json."""
    parser = arguments_of(__doc__)
    parser.add_argument("--again", type=int, default=2, help="starts with the cache filled; the quickest is judged")
    add_model(parser)
    options = parser.parse_args()
    _empty(CACHE)
    rows: list[dict[str, Any]] = []
    for turn in range(1 + options.again):
        rows.append(measure(f"filled, start {turn}" if turn else "empty", options.model))
        keep("start", TITLE, rows, folder=options.folder, model=options.model)
    _empty(CACHE)
    filled = min((row["replica ready s"] for row in rows[1:]), default=float("nan"))
    figures = {"ready s, cached": filled, "ready s": rows[0]["replica ready s"]}
    publish("start", TITLE, rows, folder=options.folder, figures=figures, model=options.model)


def _empty(folder: Path) -> None:
    shutil.rmtree(folder, ignore_errors=True)


if __name__ == "__main__":
    main()
