"""The bare engine, towers × batch × runner, against the machine's matrix rate in the same run."""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from typing import Any

from benchmarks.plan import ROOT
from benchmarks.results import arguments_of, keep, publish, say
from benchmarks.subjects import captions, checkpoint, jpegs, operations_per_image

SECONDS, TURNS = 8.0, 2
TITLE = "The bare engine, CLIP ViT-B/32"
KINDS = {
    "vision bf16 openvino": {"tower": "vision", "dtype": "bfloat16", "runner": "openvino"},
    "vision bf16, 2 lanes openvino": {"tower": "vision", "dtype": "bfloat16", "runner": "openvino", "lanes": 2},
    "vision int8 openvino": {"tower": "vision", "dtype": "bfloat16", "runner": "openvino", "quantization": "int8"},
    "vision fp32 openvino": {"tower": "vision", "dtype": "float32", "runner": "openvino"},
    "vision bf16 eager": {"tower": "vision", "dtype": "bfloat16", "runner": "eager"},
    "text bf16 openvino": {"tower": "text", "dtype": "bfloat16", "runner": "openvino"},
}


def measure(kind: str, batches: Sequence[int], seconds: float, limit: bool) -> list[dict[str, Any]]:
    """In this process: the engine of a kind at each batch, the median and the quickest forward.

    limit: whether the matrix rate is measured beside it.
    """
    import psutil
    import torch

    from benchmarks.ceiling import HINTS, chained_rate, rates
    from encoder.engine import Engine
    from encoder.settings import EngineSettings

    values = {"model": str(checkpoint()), "buckets": list(batches), "threads": torch.get_num_threads(), **KINDS[kind]}
    started = time.perf_counter()
    engine = Engine.load(EngineSettings.model_validate(values))
    ready_s = time.perf_counter() - started
    rows = []
    for batch in batches:
        if engine.tower == "vision":
            items: list[Any] = [engine.prepare_image(picture) for picture in jpegs(batch)]
        else:
            items = [engine.prepare_text(text) for text in captions(batch)]
        dtype = "int8" if "int8" in kind else "bfloat16" if "bf16" in kind else "float32"
        taken: list[float] = []
        rate = chained = 0.0
        # In turns, so that a machine that is slow for a while is so for both; of each the best counts.
        for _ in range(TURNS):
            until = time.perf_counter() + seconds / TURNS
            while time.perf_counter() < until or not taken:
                begun = time.perf_counter()
                runner = engine.forward(items).runner
                taken.append(time.perf_counter() - begun)
            if limit and engine.tower == "vision":
                rate = max(rate, rates(batch, dtype)[0])
                chained = max(chained, chained_rate(batch, dtype)) if dtype in HINTS else 0.0
        taken.sort()
        row: dict[str, Any] = {
            "engine": kind,
            "batch": batch,
            "runner": runner,
            "items/s": batch / taken[len(taken) // 2],
            "best ms": taken[0] * 1e3,
            "median ms": taken[len(taken) // 2] * 1e3,
        }
        if rate:
            row["GFLOP/s"] = operations_per_image() * batch / taken[0] / 1e9
            row["matrix GFLOP/s"] = rate
            row["of the limit"] = row["GFLOP/s"] / rate
            if chained:
                row["chained GFLOP/s"], row["of chained"] = chained, row["GFLOP/s"] / chained
        rows.append(row)
    checks = [check.worst_cosine for check in engine.report().self_checks if check.runner == runner]
    for row in rows:
        row |= {"worst self-check cosine": min(checks), "ready s": ready_s}
        row["RSS MB"] = psutil.Process().memory_info().rss / 1e6
    return rows


def bare(kind: str, batches: Sequence[int], seconds: float = SECONDS, limit: bool = False) -> list[dict[str, Any]]:
    """The rows of a kind from a process of its own."""
    command = [sys.executable, "-m", "benchmarks.engine", "--only", kind, "--seconds", str(seconds)]
    command += ["--limit" if limit else "--no-limit", "--batches", *map(str, batches)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=900, cwd=ROOT)
    if done.returncode != 0:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise RuntimeError(f"the engine {kind!r} failed: {reason}")
    rows: list[dict[str, Any]] = json.loads(done.stdout.splitlines()[-1])
    return rows


def main() -> None:
    """Each kind in a process of its own, so that none inherits another's memory or threads."""
    parser = arguments_of(__doc__)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--only", choices=list(KINDS), help="measure one kind here and print JSON")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each batch")
    parser.add_argument("--limit", action=argparse.BooleanOptionalAction, default=True, help="measure the matrix rate")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments.batches, arguments.seconds, arguments.limit)))
        return
    rows = []
    for kind in arguments.kinds:
        say(f"engine {kind}")
        try:
            rows += bare(kind, arguments.batches, arguments.seconds, arguments.limit)
        except (RuntimeError, subprocess.TimeoutExpired) as error:
            say(f"  {error}")
        keep("engine", TITLE, rows, folder=arguments.folder)
    publish("engine", TITLE, rows, folder=arguments.folder)
    if len({row["engine"] for row in rows}) < len(arguments.kinds):
        sys.exit(1)


if __name__ == "__main__":
    main()
