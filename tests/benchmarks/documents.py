"""Results of every benchmark by formula, in the shape that the scripts write."""

from typing import Any

MACHINE = {
    "processor": "A processor",
    "cores": 2,
    "instructions": ["avx2"],
    "load": 0.5,
    "python": "3.11.0",
    "versions": {"torch": "2.13.0"},
    "date": "2026-01-31",
}
OVER_INFINITY = {" images/s": 2.53, " in floats p50 ms": 0.3}
BF16, INT8 = "vision bf16 openvino", "vision int8 openvino"


def document(title: str, rows: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
    return {"title": title, "machine": MACHINE, "rows": rows, **more}


def engine_rows() -> list[dict[str, Any]]:
    """Rates of 40 and 72 images a second: int8 is 1.8 times bf16."""
    return [
        {
            "engine": kind,
            "batch": batch,
            "items/s": rate,
            "of the limit": 0.9,
            "worst self-check cosine": 0.9987,
        }
        for kind, rate in ((BF16, 40.0), (INT8, 72.0))
        for batch in (1, 32)
    ]


def load_row(way: str, load: str, p50: float) -> dict[str, Any]:
    row = {"engine": "bf16", "way": way, "load": load, "items/s": 38.0, "p50 ms": p50}
    if way == "router":
        row |= {"preprocess ms": 4.0, "queue ms": 0.5, "forward ms": 22.0, "finish ms": 0.25, "total ms": 28.0}
    return row | {"p95 ms": 2 * p50, "p99 ms": 3 * p50, "errors": 0, "replica cores": 1.7, "router cores": 0.05}


def documents() -> dict[str, dict[str, Any]]:
    """All but `ceiling`, which the page has to miss; `router` was ended early."""
    axes = (("images in a request, one client", (1, 8)), ("clients, one image each", (1, 32)))
    peers = [
        {"who": who, "setting": setting, "images/s": rate, "p50 ms": p50, "texts/s": None, "note": None}
        for who, setting, rate, p50 in (("infinity", "fp32", 15.0, 100.0), ("vitfleet", "bf16", 38.0, 30.0))
    ]
    peers.append({"who": "clip-as-service", "setting": "", "images/s": None, "note": "not measured: it needs a thing"})
    return {
        "engine": document("Engine", engine_rows()),
        "preprocess": document("Pixels", [{"what": "vitfleet torch", "ms": 1.5, "pictures/s": 666.0, "times": 4.25}]),
        "isolation": document("Workers", [{"what": "PNG", "thread ms": 2.0, "worker ms": 3.0}]),
        "serve": document(
            "Service",
            [load_row("router", "1 client × 1", 31.0), load_row("direct", "1 client × 1", 30.0)],
            engines=[{"engine": "bf16", "batch": 1, "items/s": 40.0}],
            memory=[{"engine": "bf16", "RSS before MB": 700.0}],
            figures={"bf16 service over bare engine": 0.93, "bf16 p50 over bare batch-1 ms": 7.5},
        ),
        "peers": document(
            "Peers",
            peers,
            figures={f"vitfleet bf16 over infinity{key}": value for key, value in OVER_INFINITY.items()},
        ),
        "growth": document(
            "Growth",
            [{"axis": axis, "value": value, "items/s": 30.0 + value} for axis, values in axes for value in values],
            memory=[{"pictures": 500 * i, "RSS MB": 700.0 + i} for i in range(1, 21)],
            figures={"pictures": 10_000.0, "RSS MB": 720.0, "RSS drift %": 2.7},
        ),
        "start": document(
            "Start",
            [
                {"cache": cache, "replica ready s": 9.0, "load s": 1.0, "capture s": 2.0}
                for cache in ("empty", "filled")
            ],
            figures={"ready s, cached": 9.0},
        ),
        "router": document("Router", [{"way": "router", "p50 ms": 2.0}], figures={"router overhead ms": 1.2}),
        "run": {"steps": [{"name": "router", "status": "ended", "seconds": 9.0, "reason": "not done after 9 s"}]},
    }
