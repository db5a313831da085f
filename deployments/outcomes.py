"""What became of the items of a call on their way, and the parts of a response that are read off them."""

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from encoder.batching import BatchedRow
from encoder.errors import EncoderError
from encoder.outputs import FinishedVector, OutputOptions, finish
from encoder.v1 import encoder_pb2 as pb


@dataclass(frozen=True)
class Outcome:
    """One item after the forward: its row or its error. `prepared_at`: when it was ready for the device (monotonic)."""

    prepared_at: float
    row: BatchedRow | None = None
    error: EncoderError | None = None
    token_count: int = 0
    truncated: bool = False


def finish_outcomes(
    outcomes: Sequence[Outcome], options: OutputOptions
) -> tuple[list[FinishedVector | EncoderError], float]:
    """Each item's packed vector or error, in order, and the milliseconds that took."""
    started = time.monotonic()
    rows = [outcome.row.vector for outcome in outcomes if outcome.row is not None]
    finished = iter(finish(np.stack(rows), options) if rows else [])
    answers = [next(finished) if outcome.error is None else outcome.error for outcome in outcomes]
    return answers, (time.monotonic() - started) * 1e3


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
