"""What grows with what: images in a request, clients, picture size, replicas, and memory over 10,000 pictures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.fleet import VISION, Pool, Running, fleet
from benchmarks.plan import Plan, carry_out
from benchmarks.results import add_model, arguments_of, keep, publish, say

TITLE = "Cost against load, CLIP ViT-B/32, bf16"
BUCKETS = (1, 2, 4, 8, 16, 32)
SIZES = ((160, 120), (640, 480), (4000, 3000))
CROWD = 32
SAMPLE = 500
# A chunk of pictures that takes longer hangs.
CHUNK_S = 60.0


@dataclass
class Findings:
    """What was measured so far; kept in the folder after each load."""

    folder: Path
    model: str | None
    rows: list[dict[str, Any]] = field(default_factory=list)
    memory: list[dict[str, Any]] = field(default_factory=list)
    figures: dict[str, float] = field(default_factory=dict)

    @property
    def more(self) -> dict[str, Any]:
        return {"memory": self.memory, "figures": self.figures, "model": self.model}

    def take(self, axis: str, value: Callable[[Plan], Any], plans: Sequence[Plan]) -> None:
        """Carries out the plans; `value` is where a plan lies on the axis."""
        say(axis)
        for plan, row in zip(plans, carry_out(plans), strict=True):
            self.rows.append(
                {
                    "axis": axis,
                    "value": value(plan),
                    "items/s": row["items/s"],
                    "ms an item": 1e3 / row["items/s"],
                    "p50 ms": row["p50 ms"],
                    "p99 ms": row["p99 ms"],
                    "errors": row["errors"],
                    "replica cores": row["cores"].get("replica"),
                    "client cores": row["cores"]["client"],
                }
            )
            keep("growth", TITLE, self.rows, folder=self.folder, **self.more)


def base_of(running: Running, seconds: float) -> Plan:
    """A load through the router."""
    return Plan("", running.router, seconds=seconds, warmup=1.0, processes=running.roles())


def remember(findings: Findings, running: Running, pictures: int) -> None:
    """Load until the replica has served so many pictures in all, with its memory after each `SAMPLE` of them."""
    say(f"memory over {pictures} pictures")
    chunks = max(1, -(-(pictures - running.served()) // SAMPLE))
    chunk = replace(base_of(running, CHUNK_S), clients=CROWD, most_items=SAMPLE, warmup=0.0)
    for _ in carry_out([replace(chunk, name=f"{SAMPLE} pictures, {turn + 1} of {chunks}") for turn in range(chunks)]):
        memory = running.memory()
        findings.memory.append(
            {"pictures": running.served(), "RSS MB": memory.megabytes, "of it decode workers MB": memory.workers / 1e6}
        )
        keep("growth", TITLE, findings.rows, folder=findings.folder, **findings.more)
    taken = [sample["RSS MB"] for sample in findings.memory]
    findings.figures |= {
        "pictures": float(running.served()),
        "RSS MB": max(taken),
        "RSS drift %": max(abs(sample - taken[0]) for sample in taken) / taken[0] * 100,
    }


def one_replica(findings: Findings, options: Any) -> None:
    """All that one replica with both cores shows."""
    with fleet([Pool(engine={"buckets": list(BUCKETS)}, model=options.model)]) as running:
        base = base_of(running, options.seconds)
        counts = [replace(base, name=f"{count} a request", items=count) for count in options.items]
        slow = [replace(plan, seconds=max(options.seconds, plan.items / 25)) for plan in counts]
        findings.take("images in a request, one client", lambda plan: plan.items, slow)
        crowds = [replace(base, name=f"{clients} clients", clients=clients) for clients in options.clients]
        findings.take("clients, one image each", lambda plan: plan.clients, crowds)
        if options.pictures:
            remember(findings, running, options.pictures)
        sizes = [
            replace(base, name=f"{width}×{height}", width=width, height=height, clients=8) for width, height in SIZES
        ]
        sizes[-1] = replace(sizes[-1], seconds=2 * options.seconds)  # so that enough of the large ones are answered
        findings.take("megapixels of a picture, 8 clients", lambda plan: plan.width * plan.height / 1e6, sizes)


def more_replicas(findings: Findings, options: Any) -> None:
    """One and two replicas of one CPU each."""
    for count in options.replicas:
        pool = Pool(cpus=1.0, replicas=count, engine={"buckets": list(BUCKETS)}, model=options.model)
        with fleet([pool]) as running:
            crowd = replace(base_of(running, options.seconds), name=f"{count} of one CPU", clients=CROWD)
            where = len(running.reports[VISION])
            findings.take(f"replicas of one CPU, {CROWD} clients", lambda plan, where=where: where, [crowd])


def main() -> None:
    """Prints and writes growth.json."""
    parser = arguments_of(__doc__)
    parser.add_argument("--items", type=int, nargs="+", default=[1, 8, 32, 128, 256], help="images in a request")
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 8, 32, 128], help="of one image each")
    parser.add_argument("--replicas", type=int, nargs="*", default=[1, 2], help="of one CPU each")
    parser.add_argument("--pictures", type=int, default=10_000, help="served in all while memory is looked at; 0: none")
    parser.add_argument("--seconds", type=float, default=4.0, help="for each load")
    add_model(parser)
    options = parser.parse_args()
    findings = Findings(options.folder, options.model)
    one_replica(findings, options)
    more_replicas(findings, options)
    publish("growth", TITLE, findings.rows, folder=options.folder, **findings.more)


if __name__ == "__main__":
    main()
