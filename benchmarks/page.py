"""Writes docs/benchmarks/README.md and its plots from the JSON that the benchmarks left there."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.journey import journey
from benchmarks.results import arguments_of, say, shown
from benchmarks.thresholds import Document, judge

# In the page's order: document, and what its columns say that their names do not.
SECTIONS: Mapping[str, str] = {
    "ceiling": "`GFLOP/s` is over all of the tower's matrix products, each at the best of oneDNN and OpenVINO.",
    "engine": "`items/s` is by the median forward, `GFLOP/s` and `of the limit` by the quickest, the limit being "
    "`matrix GFLOP/s`, measured in the same process: each product repeated alone, its weights in the caches. "
    "`chained` are the layers' products one after the other, with weights that come from memory as a tower's do. "
    "Operations are those of all tokens through all layers: what an engine leaves out, as OpenVINO does in the last "
    "layer for all but the pooled token, is counted.",
    "preprocess": "`ms` is of the quickest round over all pictures; `times` is the first row's `ms` over the row's.",
    "isolation": "`ms` is of the quickest round over eight pictures.",
    "serve": "`direct` goes past the router, to Serve's own gRPC port. Each client has a connection of its own; open "
    "loads have Poisson arrivals at a share of the highest closed rate, and latency counts from when one was due. "
    "`cores` is processor time over elapsed time; stages are the service's own, a mean over requests. "
    "`service over bare engine` is of the closed loop with the most clients, over the engine's rate at its best batch.",
    "peers": "A server is asked by 32 clients (`images/s`, `texts/s`) and by one (`p50 ms`); a library runs in a loop. "
    "`worst cosine` is over eight pictures, to transformers' float32 vectors.",
    "growth": "`ms an item` is 1000 over `items/s`; `RSS MB` is the highest sample, `RSS drift %` the "
    "greatest distance from the first.",
    "start": "`replica ready s` counts from when the fleet asks for the replica's process; stages are its report's.",
    "router": "The pool answers 100 KB requests with a fixed vector; pool, router and client are a process each.",
}
EXTRA_TABLES = {"serve": (("engines", "The bare engine beside it"), ("memory", "Memory of the replica")),
                "growth": (("memory", "Memory over the pictures served"),)}  # fmt: skip
STEPS = "run"
KNOWN_PEERS = ("transformers", "sentence-transformers", "infinity", "clip-as-service")


def read(folder: Path) -> dict[str, Document]:
    """The documents that there are, by name."""
    names = [*SECTIONS, STEPS]
    return {
        name: json.loads((folder / f"{name}.json").read_text()) for name in names if (folder / f"{name}.json").exists()
    }


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Markdown; a row's keys are the columns, and a column that no row has a value for is left out."""
    keys = dict.fromkeys(key for row in rows for key in row)
    columns = [key for key in keys if any(row.get(key) not in (None, "") for row in rows)]
    lines = [columns, ["---"] * len(columns), *([_cell(row.get(column)) for column in columns] for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def judged_table(documents: Mapping[str, Document]) -> str:
    """All thresholds, and how many hold."""
    judged = judge(documents)
    words = {True: "passed", False: "**missed**", None: "not measured"}
    rows = [
        {
            "what": one.what,
            "asked": one.asked,
            "measured": one.measured,
            "outcome": words[one.passed],
            "by": f"`{one.source}`",
        }
        for one in judged
    ]
    passed = sum(one.passed is True for one in judged)
    return f"{passed} of {len(judged)} hold.\n\n{table(rows)}"


def section(name: str, document: Document, plots: Sequence[str]) -> str:
    """One document: its tables and plots."""
    parts = [f"## {document['title']}", SECTIONS[name], table(document["rows"])]
    if document.get("model"):
        parts.insert(1, f"Served was not ViT-B/32 but `{document['model']}`.")
    if document.get("peers"):
        parts.append("Peers: " + ", ".join(f"{peer} {version}" for peer, version in document["peers"].items()) + ".")
    for key, title in EXTRA_TABLES.get(name, ()):
        if document.get(key):
            parts += [f"{title}:", table(document[key])]
    if document.get("figures"):
        parts += ["In figures:", table([{"figure": key, "value": value} for key, value in document["figures"].items()])]
    parts += [f"![{plot}]({plot}.png)" for plot in plots]
    parts.append(f"Taken on {document['machine']['date']}, load average {document['machine']['load']} at the end.")
    return "\n\n".join(parts)


def machine(document: Document) -> str:
    """Processor, cores, instructions, versions."""
    told = document["machine"]
    versions = ", ".join(f"{name} {version}" for name, version in told["versions"].items())
    extras = ", ".join(told["instructions"])
    return f"{told['cores']} cores of {told['processor']} ({extras}); Python {told['python']}, {versions}."


def not_run(documents: Mapping[str, Document]) -> str:
    """Scripts without a result or with half a one, and peers without a figure."""
    steps = {step["name"]: step for step in documents.get(STEPS, {}).get("steps", [])}
    lines = []
    for name in SECTIONS:
        step = steps.get(name, {})
        failed = step.get("status", "done") != "done"
        reason = f": {step['status']}, {step['reason']}" if failed else ""
        if name not in documents:
            lines.append(f"- `{name}` has no result{reason}")
        elif failed:
            lines.append(f"- `{name}` ended early, its figures are a part{reason}")
    for row in documents.get("peers", {}).get("rows", []):
        if row.get("images/s") is None:
            lines.append(f"- {row['who']} {row['setting']}".rstrip() + f": {row.get('note')}")
    if "peers" in documents:
        asked = {row["who"] for row in documents["peers"]["rows"]}
        lines += [f"- {peer}: left out of this run" for peer in KNOWN_PEERS if peer not in asked]
    return "\n".join(lines) or "Nothing was left out."


def other_machines(folder: Path) -> str:
    """A line for each folder below that holds a page of its own."""
    lines = []
    for path in sorted(folder.glob("*/README.md")):
        documents = [document for name, document in read(path.parent).items() if name in SECTIONS]
        told = f": {machine(documents[0])}" if documents else ""
        lines.append(f"- [{path.parent.name}]({path.parent.name}/README.md){told}")
    return "\n".join(lines)


def page(documents: Mapping[str, Document], plots: Mapping[str, Sequence[str]], others: str = "") -> str:
    """The whole page."""
    own = {name: document for name, document in documents.items() if name in SECTIONS}
    first = next(iter(own.values()), None)
    parts = [
        "# Benchmarks",
        "Written by `python -m benchmarks.page` from the JSON beside it; every number is of one machine.",
        machine(first) if first else "There is no result yet.",
        "## What is asked, and what was measured",
        judged_table(own),
        "## How to repeat it",
        "`make bench` runs all but the peers, `make bench-peers` the peers (it installs them into `.cache/peers`), and "
        "`python -m benchmarks.NAME --help` names the options of one. Leave the machine alone meanwhile.",
        *(["## Other machines", others] if others else []),
        *_where_time_goes(own.get("serve")),
        "## What was not run",
        not_run(documents),
        *(section(name, own[name], plots.get(name, ())) for name in SECTIONS if name in own),
    ]
    return "\n\n".join(parts) + "\n"


def _where_time_goes(document: Document | None) -> list[str]:
    """The section on it; none without the loads that it is read from."""
    rows = {load: journey(document, load=load) for load in ("1 client × 1", "32 clients × 1")} if document else {}
    tables = [f"{load}:\n\n{table(told)}" for load, told in rows.items() if told]
    return ["## Where a request's time goes", *tables] if tables else []


def draw(documents: Mapping[str, Document], folder: Path) -> dict[str, list[str]]:
    """The plots that could be drawn, by document; a document of another shape costs its own plot alone."""
    try:
        from benchmarks.plots import PLOTS
    except ImportError as error:
        say(f"no plots, {error}: install the extra `bench`")
        return {}
    drawn: dict[str, list[str]] = {}
    for name, own in PLOTS.items():
        for plot, function in own.items():
            if name not in documents:
                continue
            try:
                function(documents[name], folder / f"{plot}.png")
            except (KeyError, ValueError, IndexError, TypeError) as error:
                say(f"no plot {plot}: {type(error).__name__}: {error}")
                continue
            drawn.setdefault(name, []).append(plot)
    return drawn


def write(folder: Path) -> Path:
    """Reads, draws, writes; gives the page's path."""
    documents = read(folder)
    path = folder / "README.md"
    folder.mkdir(parents=True, exist_ok=True)
    path.write_text(page(documents, draw(documents, folder), other_machines(folder)))
    return path


def main() -> None:
    """Prints where the page is, and what is asked beside what was measured."""
    options = arguments_of(__doc__).parse_args()
    path = write(options.folder)
    print(judged_table({name: document for name, document in read(options.folder).items() if name in SECTIONS}))
    print(f"written: {path}")


def _cell(value: Any) -> str:
    return shown(value).replace("|", "\\|") if value != "" else "-"


if __name__ == "__main__":
    main()
