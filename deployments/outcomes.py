"""What became of the items of a call on their way, and the parts of a response that are read off them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from deployments.wire import Answer
from encoder.batching import BatchedRow
from encoder.errors import EncoderError, InvalidInput
from encoder.features import feature_bytes, finish_features
from encoder.outputs import OutputDtype, OutputOptions, finish
from encoder.v1 import encoder_pb2 as pb

# Room in an answer for what is not features: provenance and timings, and the framing of one image's features.
ANSWER_OVERHEAD_BYTES = 4096
FEATURES_OVERHEAD_BYTES = 64


@dataclass(frozen=True)
class Outcome:
    """One item after the forward: its row or its error. `prepared_at`: when it was ready for the device (monotonic).

    `grid`: shape of its patch features where they were asked for.
    """

    prepared_at: float
    row: BatchedRow | None = None
    error: EncoderError | None = None
    token_count: int = 0
    truncated: bool = False
    grid: tuple[int, ...] = ()


def finish_outcomes(outcomes: Sequence[Outcome], options: OutputOptions) -> tuple[list[Answer], float]:
    """Each item's packed vector, or features, or error, in order, and the milliseconds that took."""
    started = time.monotonic()
    answers = _features(outcomes, options) if options.kind == "tokens" else _vectors(outcomes, options)
    return answers, (time.monotonic() - started) * 1e3


def check_answer_size(
    grids: Sequence[tuple[int, ...]], dimensions: int, dtype: OutputDtype, max_bytes: int, limit_name: str
) -> int:
    """Bytes of the features of images with these grids; raises InvalidInput when they do not fit into one answer."""
    sizes = [feature_bytes(grid, dimensions, dtype) + FEATURES_OVERHEAD_BYTES for grid in grids]
    total, largest = sum(sizes), max(sizes, default=0)
    if total > max_bytes - ANSWER_OVERHEAD_BYTES:
        fitting = max(0, max_bytes - ANSWER_OVERHEAD_BYTES) // largest
        advice = f"at most {fitting} of this size fit, send fewer at once" if fitting else "not even one fits"
        half = " or ask for float16" if dtype == "float32" else ""
        raise InvalidInput(
            f"the patch features of {len(grids)} images are {total} bytes and an answer holds {max_bytes} "
            f"({limit_name}): {advice}{half}"
        )
    return total


def _features(outcomes: Sequence[Outcome], options: OutputOptions) -> list[Answer]:
    answers: list[Answer] = []
    for outcome in outcomes:
        if outcome.row is not None and outcome.row.tokens is not None:
            answers.append(finish_features(outcome.row.tokens, outcome.grid, options.dtype))
        else:
            answers.append(outcome.error or EncoderError("the forward gave no features for this item"))
    return answers


def _vectors(outcomes: Sequence[Outcome], options: OutputOptions) -> list[Answer]:
    rows = [outcome.row.vector for outcome in outcomes if outcome.row is not None]
    finished = iter(finish(np.stack(rows), options) if rows else [])
    return [next(finished) if outcome.error is None else outcome.error for outcome in outcomes]


def timings_of(outcomes: Sequence[Outcome], started: float, finish_ms: float) -> pb.StageTimings:
    """Where the time since `started` (monotonic) went; a stage lasts until its last item is through."""
    rows = [outcome.row for outcome in outcomes if outcome.row is not None]
    return pb.StageTimings(
        preprocess_ms=(max(outcome.prepared_at for outcome in outcomes) - started) * 1e3,
        queue_ms=max((row.queue_ms for row in rows), default=0.0),
        forward_ms=max((row.forward_ms for row in rows), default=0.0),
        finish_ms=finish_ms,
        total_ms=(time.monotonic() - started) * 1e3,
        batch_size=max((row.batch_size for row in rows), default=0),
    )
