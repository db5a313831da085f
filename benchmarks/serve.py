"""The service on this machine: JPEG 640×480 in, vector out, through the router and past it, beside the bare engine."""

import argparse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.engine import bare
from benchmarks.fleet import TEXT, VISION, Pool, Running, fleet
from benchmarks.plan import Plan, carry_out
from benchmarks.results import add_model, arguments_of, keep, publish, say

TITLE = "The service, CLIP ViT-B/32, JPEG 640×480"
BUCKETS = (1, 2, 4, 8, 16, 32)
OPEN_SHARES = (0.5, 0.8)
ROLES = ("replica", "router", "haproxy", "ray", "client")
MANY = 32
BARE_BATCHES = (1, 8, 32)


@dataclass
class Findings:
    """What was measured so far; kept in the folder after each part."""

    folder: Path
    model: str | None
    rows: list[dict[str, Any]] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    engines: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    def keep(self) -> None:
        keep("serve", TITLE, self.rows, folder=self.folder, **self.more)

    @property
    def more(self) -> dict[str, Any]:
        return {"memory": self.memory, "engines": self.engines, "figures": self.figures, "model": self.model}

    def find(self, engine: str, way: str, load: str) -> dict[str, Any] | None:
        """The row of a load."""
        wanted = {"engine": engine, "way": way, "load": load}
        return next((row for row in self.rows if wanted.items() <= row.items()), None)


def closed(clients: int, items: int = 1) -> str:
    """The name of a closed loop."""
    return f"{clients} client{'s' if clients > 1 else ''} × {items}"


def flat(row: Mapping[str, Any], engine: str, way: str) -> dict[str, Any]:
    """A load's row as the table shows it: a column for each role's cores and each stage."""
    taken = {key: row[key] for key in ("load", "items/s", "p50 ms", "p95 ms", "p99 ms", "errors")}
    cores = {f"{role} cores": row["cores"][role] for role in ROLES if role in row["cores"]}
    stages = {name.replace("_ms", " ms").replace("_", " "): value for name, value in row["stages"].items()}
    return {"engine": engine, "way": way} | taken | cores | stages


def vision(findings: Findings, engine: str, settings: Mapping[str, Any], options: argparse.Namespace) -> None:
    """A fleet with one vision pool under all loads, then its engine alone on the same machine."""
    with fleet([Pool(engine={"buckets": list(BUCKETS), **settings}, model=options.model)]) as running:
        before = running.memory()
        base = Plan("", running.router, seconds=options.seconds, warmup=options.warmup, processes=running.roles())
        loops = [(clients, 1) for clients in options.clients] + [(1, MANY)]
        plans = [replace(base, name=closed(*loop), clients=loop[0], items=loop[1]) for loop in loops]
        _run(findings, engine, "router", plans)
        fullest = max((row["items/s"] for row in findings.rows if row["engine"] == engine), default=0.0)
        if options.open and fullest > 0:
            _run(
                findings,
                engine,
                "router",
                [replace(base, name=f"open, {share:.0%}", rate=share * fullest) for share in OPEN_SHARES],
            )
        if options.direct:
            past = [replace(plan, address=running.serve, application=VISION) for plan in plans]
            _run(findings, engine, "direct", past)
        findings.memory.append(_memory_row(engine, running, before.megabytes))
        findings.keep()
    if options.bare:
        _compare(findings, engine, bare(f"vision {engine} openvino", BARE_BATCHES, options.bare_seconds))
    _figures(findings, engine, max(options.clients))
    findings.keep()


def texts(findings: Findings, options: argparse.Namespace) -> None:
    """A fleet with one text pool."""
    with fleet([Pool(name=TEXT, model=options.model)]) as running:
        base = Plan("", running.router, kind="text", seconds=options.seconds, warmup=options.warmup)
        base = replace(base, processes=running.roles())
        plans = [replace(base, name=closed(clients), clients=clients) for clients in (1, max(options.clients))]
        _run(findings, "text bf16", "router", plans)
        if (row := findings.find("text bf16", "router", closed(max(options.clients)))) is not None:
            findings.figures["texts/s, most clients"] = row["items/s"]
        findings.keep()


def _run(findings: Findings, engine: str, way: str, plans: Sequence[Plan]) -> None:
    say(f"{engine}, {way}")
    for row in carry_out(plans):
        findings.rows.append(flat(row, engine, way))
        findings.keep()


def _memory_row(engine: str, running: Running, before_mb: float) -> dict[str, Any]:
    after = running.memory()
    return {
        "engine": engine,
        "RSS before MB": before_mb,
        "RSS after MB": after.megabytes,
        "of it decode workers MB": after.workers / 1e6,
    }


def _compare(findings: Findings, engine: str, rows: Sequence[Mapping[str, Any]]) -> None:
    findings.engines += [
        {"engine": engine, "batch": row["batch"], "items/s": row["items/s"], "median ms": row["median ms"]}
        for row in rows
    ]
    best = max(row["items/s"] for row in rows)
    findings.figures[f"{engine} bare items/s"] = best
    findings.figures[f"{engine} bare batch-1 ms"] = next(row["median ms"] for row in rows if row["batch"] == 1)


def _figures(findings: Findings, engine: str, most: int) -> None:
    """The ratios that are judged."""
    figures = findings.figures
    one, many = (findings.find(engine, "router", closed(clients)) for clients in (1, most))
    straight = findings.find(engine, "direct", closed(1))
    if many is not None and (rate := figures.get(f"{engine} bare items/s")):
        figures[f"{engine} service over bare engine"] = many["items/s"] / rate
    if one is not None and (alone := figures.get(f"{engine} bare batch-1 ms")):
        figures[f"{engine} p50 over bare batch-1 ms"] = one["p50 ms"] - alone
    if one is not None and "forward ms" in one:
        figures[f"{engine} p50 over its own forward ms"] = one["p50 ms"] - one["forward ms"]
    if one is not None and straight is not None:
        figures[f"{engine} router's share of p50 ms"] = one["p50 ms"] - straight["p50 ms"]


def main() -> None:
    """Prints and writes serve.json."""
    parser = arguments_of(__doc__)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32], help="closed loops of one picture each")
    parser.add_argument("--seconds", type=float, default=7.0, help="measured for each load")
    parser.add_argument("--warmup", type=float, default=1.5, help="seconds before")
    parser.add_argument("--bare-seconds", type=float, default=5.0, help="for each batch of the bare engine")
    for name, what in (
        ("int8", "the int8 engine too"),
        ("lanes", "bf16 with two lanes too"),
        ("text", "the text tower too"),
        ("open", "open arrivals too"),
        ("direct", "past the router too"),
        ("bare", "the bare engine beside it"),
    ):
        parser.add_argument(f"--{name}", action=argparse.BooleanOptionalAction, default=True, help=what)
    add_model(parser)
    options = parser.parse_args()
    findings = Findings(options.folder, options.model)
    vision(findings, "bf16", {}, options)
    closed_only = argparse.Namespace(**vars(options) | {"open": False, "direct": False})
    if options.lanes:
        vision(findings, "bf16, 2 lanes", {"lanes": 2}, closed_only)
    if options.int8:
        vision(findings, "int8", {"quantization": "int8"}, closed_only)
    if options.text:
        texts(findings, options)
    publish("serve", TITLE, findings.rows, folder=options.folder, **findings.more)


if __name__ == "__main__":
    main()
