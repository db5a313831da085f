"""The machine's own limit: its matrix rate at the very shapes of the tower, in the dtypes that are served.

The rate of a dtype is the best of two libraries a shape: oneDNN through torch, and OpenVINO with packed weights.
"""

import time
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from benchmarks.results import arguments_of, publish, say
from benchmarks.subjects import HIDDEN, INTERMEDIATE, LAYERS, TOKENS, gemms

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
HINTS = {"float32": "f32", "bfloat16": "bf16"}
SECONDS = 0.25


def best_seconds(run: Callable[[], object], seconds: float = SECONDS) -> float:
    """The quickest of the runs that fit into `seconds`, at least five."""
    run()
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while len(taken) < 5 or time.perf_counter() < until:
        started = time.perf_counter()
        run()
        taken.append(time.perf_counter() - started)
    return min(taken)


def torch_seconds(rows: int, inner: int, columns: int, dtype: str) -> float:
    """One linear layer through oneDNN."""
    x = torch.randn(rows, inner).to(DTYPES[dtype])
    layer = torch.nn.Linear(inner, columns, bias=False).to(DTYPES[dtype])
    with torch.inference_mode():
        return best_seconds(lambda: layer(x))


def openvino_seconds(rows: int, inner: int, columns: int, dtype: str) -> float:
    """One product with constant weights, which OpenVINO packs once; int8 as NNCF quantises it."""
    import openvino
    import openvino.opset13 as ops

    parameter = ops.parameter([rows, inner], np.float32)
    weights = np.random.default_rng(0).standard_normal((inner, columns)).astype(np.float32)
    model = openvino.Model([ops.matmul(parameter, ops.constant(weights), False, False)], [parameter])
    x = np.random.default_rng(1).standard_normal((rows, inner)).astype(np.float32)
    if dtype == "int8":
        model = _int8(model, x)
    return _best_of_model(model, x, dtype)


def rates(batch: int, dtype: str) -> tuple[float, list[dict[str, Any]]]:
    """GFLOP/s over all products of the tower, and a row for each shape."""
    total_seconds = total_operations = 0.0
    rows = []
    for count, m, k, n in gemms(batch):
        seconds = {"openvino": openvino_seconds(m, k, n, dtype)}
        if dtype != "int8":
            seconds["torch"] = torch_seconds(m, k, n, dtype)
        best = min(seconds.values())
        operations = 2.0 * m * k * n
        total_seconds += count * best
        total_operations += count * operations
        rows.append(
            {"dtype": dtype, "batch": batch, "shape": f"{m}x{k}x{n}"}
            | {f"{name} GFLOP/s": operations / taken / 1e9 for name, taken in seconds.items()}
        )
    return total_operations / total_seconds / 1e9, rows


def chained_rate(batch: int, dtype: str) -> float:
    """GFLOP/s of the layers' products one after the other in OpenVINO, each with weights of its own.

    A product that is repeated alone finds its weights in the caches; those of a tower come from memory each time, which
    a small batch does not hide.
    """
    import openvino
    import openvino.opset13 as ops

    rng = np.random.default_rng(0)
    parameter = ops.parameter([batch * TOKENS, HIDDEN], np.float32)
    found, operations = parameter, 0.0
    for _ in range(LAYERS):
        for inner, columns in ((HIDDEN, HIDDEN),) * 4 + ((HIDDEN, INTERMEDIATE), (INTERMEDIATE, HIDDEN)):
            weights = (rng.standard_normal((inner, columns)) / np.sqrt(inner)).astype(np.float32)
            found = ops.matmul(found, ops.constant(weights), False, False)
            operations += 2.0 * batch * TOKENS * inner * columns
    model = openvino.Model([ops.result(found)], [parameter])
    x = rng.standard_normal((batch * TOKENS, HIDDEN)).astype(np.float32)
    return operations / _best_of_model(model, x, dtype, 2 * SECONDS) / 1e9


def _best_of_model(model: Any, x: np.ndarray, dtype: str, seconds: float = SECONDS) -> float:
    """As `best_seconds`, of an OpenVINO model, on as many threads as torch has."""
    import openvino

    settings = {
        "INFERENCE_PRECISION_HINT": HINTS.get(dtype, "bf16"),
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "PERFORMANCE_HINT": "LATENCY",
    }
    request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
    return best_seconds(lambda: request.infer([x], share_inputs=True, share_outputs=True), seconds)


def _int8(model: Any, x: np.ndarray) -> Any:
    import nncf

    return nncf.quantize(model, nncf.Dataset([x]), model_type=nncf.ModelType.TRANSFORMER, subset_size=1)


def main() -> None:
    """Prints and writes ceiling.json."""
    parser = arguments_of(__doc__)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16", "int8"])
    arguments = parser.parse_args()
    rows, totals = [], []
    for dtype in arguments.dtypes:
        for batch in arguments.batches:
            say(f"matrix products of ViT-B/32, {dtype}, batch {batch}")
            rate, shapes = rates(batch, dtype)
            rows += shapes
            totals.append({"dtype": dtype, "batch": batch, "GFLOP/s": rate})
    publish("ceiling", "Matrix rate at the tower's own shapes", totals, folder=arguments.folder, shapes=rows)


if __name__ == "__main__":
    main()
