"""The bare engine, towers × batch × runner, against the machine's matrix rate in the same run."""

import argparse
import json
import subprocess
import sys
import time
from typing import Any

from benchmarks.results import publish, say
from benchmarks.subjects import captions, checkpoint, jpegs, operations_per_image

SECONDS = 6.0
KINDS = {
    "vision bf16 openvino": {"tower": "vision", "dtype": "bfloat16", "runner": "openvino"},
    "vision int8 openvino": {"tower": "vision", "dtype": "bfloat16", "runner": "openvino", "quantization": "int8"},
    "vision fp32 openvino": {"tower": "vision", "dtype": "float32", "runner": "openvino"},
    "vision bf16 eager": {"tower": "vision", "dtype": "bfloat16", "runner": "eager"},
    "text bf16 openvino": {"tower": "text", "dtype": "bfloat16", "runner": "openvino"},
}


def measure(kind: str, batches: list[int]) -> list[dict[str, Any]]:
    """In this process: the engine of a kind at each batch, the median and the quickest forward."""
    import psutil
    import torch

    from benchmarks.ceiling import rates
    from encoder.engine import Engine
    from encoder.settings import EngineSettings

    values = {"model": str(checkpoint()), "buckets": batches, "threads": torch.get_num_threads(), **KINDS[kind]}
    started = time.perf_counter()
    engine = Engine.load(EngineSettings.model_validate(values))
    ready_s = time.perf_counter() - started
    rows = []
    for batch in batches:
        if engine.tower == "vision":
            items: list[Any] = [engine.prepare_image(picture) for picture in jpegs(batch)]
        else:
            items = [engine.prepare_text(text) for text in captions(batch)]
        taken: list[float] = []
        until = time.perf_counter() + SECONDS
        while len(taken) < 3 or time.perf_counter() < until:
            begun = time.perf_counter()
            runner = engine.forward(items).runner
            taken.append(time.perf_counter() - begun)
        taken.sort()
        row: dict[str, Any] = {
            "engine": kind,
            "batch": batch,
            "runner": runner,
            "items/s": batch / taken[len(taken) // 2],
            "best ms": taken[0] * 1e3,
            "median ms": taken[len(taken) // 2] * 1e3,
        }
        if engine.tower == "vision":
            dtype = "int8" if "int8" in kind else "bfloat16" if "bf16" in kind else "float32"
            rate, _ = rates(batch, dtype)
            row["GFLOP/s"] = operations_per_image() * batch / taken[0] / 1e9
            row["matrix GFLOP/s"] = rate
            row["of the limit"] = row["GFLOP/s"] / rate
        rows.append(row)
    checks = [check.worst_cosine for check in engine.report().self_checks if check.runner == runner]
    for row in rows:
        row |= {"worst self-check cosine": min(checks), "ready s": ready_s}
        row["RSS MB"] = psutil.Process().memory_info().rss / 1e6
    return rows


def main() -> None:
    """Each kind in a process of its own, so that none inherits another's memory or threads."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--only", choices=list(KINDS), help="measure one kind here and print JSON")
    arguments = parser.parse_args()
    if arguments.only:
        print(json.dumps(measure(arguments.only, arguments.batches)))
        return
    rows = []
    for kind in arguments.kinds:
        say(f"engine {kind}")
        command = [sys.executable, "-m", "benchmarks.engine", "--only", kind, "--batches", *map(str, arguments.batches)]
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=900)
        rows += json.loads(done.stdout.splitlines()[-1])
    publish("engine", "The bare engine, CLIP ViT-B/32", rows)


if __name__ == "__main__":
    main()
