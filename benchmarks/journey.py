"""Where the time of a request of one picture goes, from the loads of `serve.py`."""

from collections.abc import Mapping
from typing import Any

# What a row calls a stage, and what happens in it.
STAGES = {
    "preprocess ms": "JPEG decoding and resizing, in a thread of the replica; waiting for one included",
    "queue ms": "waiting for the forward before it",
    "forward ms": "the tower",
    "finish ms": "normalising, packing",
}
REST = "in the replica beside these: reading the request, handing over between threads, waiting for them to run"
OUTSIDE = "outside the replica: client, router, HAProxy, Serve, and the picture on its way through them"


def journey(document: Mapping[str, Any], engine: str = "bf16", load: str = "1 client × 1") -> list[dict[str, Any]]:
    """A row for each stage with its milliseconds and share; empty when the load was not measured.

    Stages are means over the requests, and the whole is their median latency, so the last row is a difference of both.
    """
    wanted = {"engine": engine, "way": "router", "load": load}
    row = next((row for row in document["rows"] if wanted.items() <= row.items()), None)
    if row is None or any(name not in row for name in (*STAGES, "total ms", "p50 ms")):
        return []
    spent = {what: row[name] for name, what in STAGES.items()}
    spent[REST] = row["total ms"] - sum(spent.values())
    spent[OUTSIDE] = row["p50 ms"] - row["total ms"]
    return [{"where": what, "ms": taken, "share": f"{taken / row['p50 ms']:.0%}"} for what, taken in spent.items()]
