"""The forward of an engine: picks the bucket for what comes, pads to it, runs it, and proves every bucket first."""

import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch

from encoder.attention.backend import dtype_name
from encoder.attention.dispatch import CallTrace
from encoder.graphs.eager import EagerRunner
from encoder.graphs.runner import Bucket, GraphRecord, GraphRunner
from encoder.models.tower import Inputs
from encoder.outputs import normalize_rows
from encoder.selfcheck import compare_rows

# dtype: (least cosine, greatest absolute error on vectors of length 1) of a replay against eager
GRAPH_THRESHOLDS = {"float32": (0.999999, 1e-5), "bfloat16": (0.9999, 1e-2), "float16": (0.9999, 1e-2)}
SLOWER_THAN_EAGER = 1.10
TIMED_AGAIN = 3


class BucketedForward:
    """Runs batches of items through a graph runner where a proven bucket fits, else eager.

    `length_of` gives an item's token count (0 for pictures); `collate` makes host inputs.
    """

    def __init__(
        self,
        runner: GraphRunner,
        eager: EagerRunner,
        buckets: Sequence[Bucket],
        collate: Callable[..., dict[str, torch.Tensor]],
        length_of: Callable[[Any], int],
    ) -> None:
        self._runner = runner
        self._eager = eager
        self._collate = collate
        self._length_of = length_of
        self._records = {
            bucket: GraphRecord(runner.name, bucket, runner.dispatcher.resolved.name, dtype_name(runner.dtype))
            for bucket in sorted(buckets)
        }
        self.counters: Counter[str] = Counter()

    @property
    def records(self) -> tuple[GraphRecord, ...]:
        """What is known of each bucket, smallest first."""
        return tuple(self._records.values())

    def prepare(self, samples: Sequence[Any], progress: Callable[[str], None]) -> None:
        """Captures every bucket, then proves each: replay equals eager, small → large → small, and is not slower."""
        batches = {bucket: self._sample(samples, bucket) for bucket in self._records}
        if self._runner.name == self._eager.name:
            self._warm_up(batches, progress)
            return
        for bucket, inputs in batches.items():
            progress(f"capture {self._runner.name} {bucket}")
            self._capture(bucket, inputs)
        expected: dict[Bucket, np.ndarray] = {}
        for bucket in (*batches, *reversed(batches)):
            if self._records[bucket].state != "ready":
                continue
            if bucket not in expected:
                progress(f"prove {self._runner.name} {bucket}")
                expected[bucket], eager_ms = _timed(self._eager, bucket, batches[bucket])
                self._note(bucket, eager_ms=eager_ms)
            self._prove(bucket, batches[bucket], expected[bucket])

    def run(self, items: Sequence[Any]) -> tuple[np.ndarray, CallTrace, str]:
        """Vectors float32 [n, D], what the attention calls did, and the runner that ran."""
        length = max(self._length_of(item) for item in items)
        bucket = self._fitting(len(items), length)
        if bucket is None:
            inputs = self._collate(items)
            vectors, trace = self._eager.run(Bucket(len(items), length), inputs)
            self.counters["eager_run"] += 1
            return vectors.numpy(), trace, self._eager.name
        vectors, trace = self._runner.run(bucket, self._padded(items, bucket))
        self.counters["graph_replay"] += 1
        return vectors[: len(items)].numpy(), trace, self._runner.name

    def release(self) -> None:
        """Gives back what all buckets hold."""
        for bucket in self._records:
            self._runner.release(bucket)

    def items_per_second(self) -> float:
        """At the best bucket, by the times measured at start."""
        return max(
            (record.bucket.batch * 1e3 / record.replay_ms for record in self._records.values() if record.replay_ms),
            default=0.0,
        )

    def _fitting(self, count: int, length: int) -> Bucket | None:
        fitting = [
            bucket
            for bucket, record in self._records.items()
            if record.state == "ready" and bucket.batch >= count and (not bucket.length or bucket.length >= length)
        ]
        return min(fitting, key=lambda bucket: (bucket.cost, bucket), default=None)

    def _padded(self, items: Sequence[Any], bucket: Bucket) -> dict[str, torch.Tensor]:
        filled = [*items, *([items[-1]] * (bucket.batch - len(items)))]
        return self._collate(filled, length=bucket.length or None)

    def _sample(self, samples: Sequence[Any], bucket: Bucket) -> dict[str, torch.Tensor]:
        fitting = [item for item in samples if not bucket.length or self._length_of(item) <= bucket.length]
        chosen = [fitting[i % len(fitting)] for i in range(bucket.batch)]
        return self._collate(chosen, length=bucket.length or None)

    def _capture(self, bucket: Bucket, inputs: Inputs) -> None:
        started = time.perf_counter()
        try:
            memory = self._runner.capture(bucket, inputs)
        except Exception as error:  # whatever a device raises at capture: this bucket is served eager, and says why
            first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            backend = self._runner.dispatcher.resolved.name
            self._note(bucket, state="eager", reason=f"capture with attention backend {backend!r} failed: {first_line}")
            return
        self._note(bucket, capture_ms=(time.perf_counter() - started) * 1e3, memory_bytes=memory)

    def _warm_up(self, batches: Mapping[Bucket, Inputs], progress: Callable[[str], None]) -> None:
        for bucket, inputs in batches.items():
            progress(f"warm up {bucket}")
            _, eager_ms = _timed(self._eager, bucket, inputs)
            self._note(bucket, eager_ms=eager_ms, replay_ms=eager_ms, state="eager", reason="no graphs here")

    def _prove(self, bucket: Bucket, inputs: Inputs, expected: np.ndarray) -> None:
        """One replay, right and quick; the quickest of all replays is what is reported."""
        replayed, replay_ms = _timed(self._runner, bucket, inputs)
        cosine, error = compare_rows(normalize_rows(replayed), normalize_rows(expected))
        least, most = GRAPH_THRESHOLDS[dtype_name(self._runner.dtype)]
        if not (cosine >= least and error <= most):
            self._disable(bucket, f"replay differs from eager: cosine {cosine:.6f}, max error {error:.1e}")
            return
        known = self._records[bucket]
        self._note(bucket, replay_ms=min(replay_ms, known.replay_ms or replay_ms))
        if known.replay_ms:  # both passes are through
            self._compare_speed(bucket, inputs)

    def _compare_speed(self, bucket: Bucket, inputs: Inputs) -> None:
        """A single measurement may be disturbed, so before a bucket is disabled both are timed again."""
        for _ in range(TIMED_AGAIN):
            record = self._records[bucket]
            if record.replay_ms <= record.eager_ms * SLOWER_THAN_EAGER:
                return
            replay_ms = min(record.replay_ms, _timed(self._runner, bucket, inputs)[1])
            eager_ms = min(record.eager_ms, _timed(self._eager, bucket, inputs)[1])
            self._note(bucket, replay_ms=replay_ms, eager_ms=eager_ms)
        record = self._records[bucket]
        self._disable(bucket, f"replay takes {record.replay_ms:.1f} ms, eager {record.eager_ms:.1f} ms")

    def _disable(self, bucket: Bucket, reason: str) -> None:
        self._note(bucket, state="disabled", reason=reason)
        self._runner.release(bucket)

    def _note(self, bucket: Bucket, **known: Any) -> None:
        self._records[bucket] = replace(self._records[bucket], **known)


def _timed(runner: GraphRunner, bucket: Bucket, inputs: Inputs) -> tuple[np.ndarray, float]:
    started = time.perf_counter()
    vectors, _ = runner.run(bucket, inputs)
    return vectors.numpy(), (time.perf_counter() - started) * 1e3
