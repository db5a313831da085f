"""The forward of an engine: splits what comes into batches, picks a proven bucket for each, and runs it, or eager."""

from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from threading import Lock
from typing import Any

import numpy as np

from encoder.attention.dispatch import CallTrace
from encoder.graphs.answers import Rows
from encoder.graphs.batches import bucket_inputs, fits, split, split_tokens
from encoder.graphs.eager import EagerRunner
from encoder.graphs.proof import BucketProof
from encoder.graphs.runner import Bucket, GraphLimits, GraphRecord, GraphRunner
from encoder.models.tower import TowerOutput

# A bucket that costs more than this many times the one that would have been right is not worth its padding.
PADDING_LIMIT = 2


@dataclass(frozen=True)
class Encoded:
    """Vectors float32 [n, D]; features of each item float32 [t, F], empty unless they were asked for; how it was done.

    `runner` is the one that ran, 'a+b' when two did.
    """

    vectors: np.ndarray
    trace: CallTrace
    runner: str
    tokens: list[np.ndarray] = field(default_factory=list)


def together(parts: Sequence[Encoded]) -> Encoded:
    """The parts of one call, in order."""
    total = CallTrace()
    for part in parts:
        total.add(part.trace)
    return Encoded(
        np.concatenate([part.vectors for part in parts]),
        total,
        "+".join(sorted({runner for part in parts for runner in part.runner.split("+")})),
        [features for part in parts for features in part.tokens],
    )


class BucketedForward:
    """Runs batches of items through a graph runner where a proven bucket fits, else eager.

    Called from one thread, or, with buckets that have lanes, from one for each of these, or, where batches are taken
    ahead, from two.
    """

    def __init__(
        self, runner: GraphRunner, eager: EagerRunner, buckets: Sequence[Bucket], limits: GraphLimits | None = None
    ) -> None:
        self._runner = runner
        self._eager = eager
        self._limits = limits or GraphLimits()
        backend, dtype = runner.dispatcher.resolved.name, runner.precision
        self._records = {
            bucket: GraphRecord(runner.name, bucket, backend, dtype)
            for bucket in sorted(buckets, key=lambda bucket: (bucket.cost, bucket))
        }
        self.lanes = max(bucket.lanes for bucket in buckets)
        self._side_by_side = ThreadPoolExecutor(self.lanes, thread_name_prefix="lane")
        self._one_eager = Lock()  # the dispatcher knows of one eager forward at a time
        self._counting = Lock()
        self._counters: Counter[str] = Counter()

    @property
    def counters(self) -> dict[str, int]:
        """How many batches were replayed, and how many ran eager."""
        with self._counting:
            return dict(self._counters)

    @property
    def largest(self) -> int:
        """Items that a lane takes at once."""
        return max(bucket.batch for bucket in self._records if bucket.lanes == self.lanes)

    @property
    def runner_name(self) -> str:
        """The runner that proven buckets go through."""
        return self._runner.name

    @property
    def takes_ahead(self) -> bool:
        """Whether a batch can be given while the one before is computed."""
        return self._runner.takes_ahead

    @property
    def precision(self) -> str:
        """What proven buckets compute in."""
        return self._runner.precision

    @property
    def notes(self) -> tuple[str, ...]:
        """What the runner has to say of itself."""
        return tuple(self._runner.notes)

    @property
    def any_ready(self) -> bool:
        """Whether some bucket is proven."""
        return any(record.state == "ready" for record in self._records.values())

    @property
    def never_eager(self) -> bool:
        """Whether every batch there can be goes through a proven bucket."""
        return not self._runner.tower.spec.packed and all(record.state == "ready" for record in self._records.values())

    @property
    def records(self) -> tuple[GraphRecord, ...]:
        """What is known of each bucket, the cheapest first."""
        return tuple(self._records.values())

    def prepare(self, samples: Sequence[Any], progress: Callable[[str], None], truth: Rows | None = None) -> None:
        """Captures and proves every bucket with the samples, whose float32 rows are `truth`: `encoder.graphs.proof`."""
        BucketProof(self._runner, self._eager, self._records, samples, progress, truth).run(self._limits)

    def run(self, items: Sequence[Any], *, tokens: bool = False, alone: bool = True) -> Encoded:
        """Any number of items, in groups that buckets take.

        `alone`: nothing else runs meanwhile, so that all of the device is theirs; else they keep to one lane.
        """
        if not alone or self.lanes == 1:
            return self._run(items, tokens, self.lanes)
        if len(items) == 1:
            return self._run(items, tokens, 1)
        share = -(-len(items) // self.lanes)
        shares = [items[start : start + share] for start in range(0, len(items), share)]
        return together(list(self._side_by_side.map(lambda part: self._run(part, tokens, self.lanes), shares)))

    def _run(self, items: Sequence[Any], tokens: bool, lanes: int) -> Encoded:
        lengths = [self._runner.tower.length_of(item) for item in items]
        serving = [bucket for bucket, record in self._records.items() if record.serves and bucket.lanes == lanes]
        rows: list[np.ndarray] = [np.empty(0)] * len(items)
        features: list[np.ndarray] = [np.empty(0)] * len(items) if tokens else []
        total, runners = CallTrace(), set()
        for group in split(lengths, serving):
            members = [items[place] for place in group]
            output, trace, runner = self._run_group(members, [lengths[place] for place in group], tokens, lanes)
            for row, place in enumerate(group):
                rows[place] = output.vectors[row].numpy()
            if output.tokens is not None:
                split_up = split_tokens(self._runner.tower, members, output.tokens.numpy())
                for place, one in zip(group, split_up, strict=True):
                    features[place] = one
            total.add(trace)
            runners.add(runner)
        return Encoded(np.stack(rows), total, "+".join(sorted(runners)), features)

    def settle(self) -> None:
        """After the proof: lets go of what only the start needed."""
        self._runner.settle()

    def release(self) -> None:
        """Gives back what all buckets hold."""
        self._side_by_side.shutdown()
        for bucket in self._records:
            self._runner.release(bucket)

    def items_per_second(self) -> float:
        """At the best bucket, by the times measured at start; a packed bucket is taken as full of its longest items."""
        return max((_rate(record) for record in self._records.values()), default=0.0)

    def _run_group(
        self, items: Sequence[Any], lengths: Sequence[int], tokens: bool, lanes: int
    ) -> tuple[TowerOutput, CallTrace, str]:
        bucket = self._fitting(lengths, lanes)
        if bucket is None:
            return self._run_eager(items, tokens)
        inputs = bucket_inputs(self._runner.tower, items, bucket)
        output, trace = self._runner.run(bucket, inputs, tokens=tokens)
        self._count("graph_replay")
        return output, trace, self._runner.name

    def _run_eager(self, items: Sequence[Any], tokens: bool = False) -> tuple[TowerOutput, CallTrace, str]:
        with self._one_eager:
            output, trace = self._eager.run(Bucket(len(items)), self._runner.tower.gather(items), tokens=tokens)
        self._count("eager_run")
        return output, trace, self._eager.name

    def _count(self, counter: str) -> None:
        with self._counting:
            self._counters[counter] += 1

    def _fitting(self, lengths: Sequence[int], lanes: int) -> Bucket | None:
        """The cheapest proven bucket that fits, unless it wastes so much that eager is the better one."""
        fitting = [
            bucket
            for bucket, record in self._records.items()
            if record.serves and bucket.lanes == lanes and fits(bucket, lengths)
        ]
        ready = next((bucket for bucket in fitting if self._records[bucket].state == "ready"), None)
        return ready if ready is not None and ready.cost <= PADDING_LIMIT * fitting[0].cost else None


def _rate(record: GraphRecord) -> float:
    bucket = record.bucket
    items = bucket.tokens / bucket.max_length if bucket.packed else bucket.batch
    milliseconds = record.device_ms if record.state == "ready" else record.eager_ms
    return items * 1e3 / milliseconds if record.serves and milliseconds else 0.0
