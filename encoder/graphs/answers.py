"""What eager says of the golden items, which graphs are held against, and how long it takes for them.

Items of a batch do not know of each other, so one run answers for every batch that they make: one for pictures, one
for each length that texts are padded to, which is part of what is computed. Its time is known of two sizes then, and
of others what it is at least. A packed batch is run as it is: what it takes is a matter of its items' lengths.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from encoder.errors import EncoderError
from encoder.graphs.batches import bucket_inputs, fits, split_tokens
from encoder.graphs.eager import EagerRunner
from encoder.graphs.runner import Bucket, GraphRunner
from encoder.models.tower import Inputs, Tower, TowerOutput


@dataclass(frozen=True)
class Rows:
    """Vectors [n, D] of a batch's items, and the features of each, [t, F], where the tower gives some."""

    vectors: np.ndarray
    tokens: list[np.ndarray]

    @classmethod
    def of(cls, tower: Tower[Any], items: Sequence[Any], output: TowerOutput) -> "Rows":
        """Those of the items; what an output holds beyond them is filler."""
        tokens = [] if output.tokens is None else split_tokens(tower, items, output.tokens.numpy())
        return cls(output.vectors[: len(items)].numpy(), tokens)

    def take(self, rows: Sequence[int]) -> "Rows":
        """Those items."""
        return Rows(self.vectors[list(rows)], [self.tokens[row] for row in rows] if self.tokens else [])

    def then(self, others: "Rows") -> "Rows":
        """These items and the others behind them."""
        return Rows(np.concatenate([self.vectors, others.vectors]), [*self.tokens, *others.tokens])


class EagerAnswers:
    """Of `samples`, in batches of `buckets`; runs what is asked for and not yet known. Raises what eager raises."""

    def __init__(self, eager: EagerRunner, samples: Sequence[Any], buckets: Sequence[Bucket]) -> None:
        self._eager = eager
        self._samples = samples
        self._lengths = [eager.tower.length_of(item) for item in samples]
        self._largest: dict[int, int] = {}  # batch, by padded length
        for bucket in buckets:
            self._largest[bucket.length] = max(bucket.batch, self._largest.get(bucket.length, 0))
        # By padded length: the places of the samples that it takes, and their rows in that order.
        self._known: dict[int, tuple[list[int], Rows]] = {}
        self._times: dict[Bucket, float] = {}

    def fitting(self, bucket: Bucket) -> list[int]:
        """Places of the samples that fit a bucket alone."""
        return [place for place, length in enumerate(self._lengths) if fits(bucket, [length])]

    def rows(self, bucket: Bucket, places: Sequence[int]) -> Rows:
        """Of samples in a batch that is not packed, whatever its size."""
        if bucket.length not in self._known:
            self._known[bucket.length] = self._together(bucket)
        known, rows = self._known[bucket.length]
        return rows.take([known.index(place) for place in places])

    def run(self, bucket: Bucket, places: Sequence[int]) -> Rows:
        """A run at the bucket's own size, whose time is kept; a packed batch has no filler then."""
        items = [self._samples[place] for place in places]
        tower = self._eager.tower
        inputs = tower.gather(items) if bucket.packed else bucket_inputs(tower, items, bucket)
        output, milliseconds = timed(self._eager, bucket, inputs)
        size = _size(bucket)
        self._times[size] = min(milliseconds, self._times.get(size, milliseconds))
        return Rows.of(tower, items, output)

    def milliseconds(self, bucket: Bucket) -> float:
        """The quickest run at that very size; 0 when there was none."""
        return self._times.get(_size(bucket), 0.0)

    def at_least(self, bucket: Bucket) -> float:
        """Milliseconds that eager takes at that size by what it took at others; packed, only what was measured.

        An item takes no less in a smaller batch. In a larger one it may, as where starting kernels takes longest; but
        one item more takes no less than it did between the sizes below, but for a tenth or so of the whole (measured
        on ViT-B/32 in bfloat16: 47, 146, 269, 501, 954 ms for 1, 4, 8, 16, 32).
        """
        if bucket.packed:
            return self.milliseconds(bucket)
        times = {size.batch: time for size, time in self._times.items() if size.length == bucket.length}
        bounds = [time * min(1.0, bucket.batch / batch) for batch, time in times.items()]
        least, most = min(times, default=0), max(times, default=0)
        if least < most < bucket.batch:
            slope = (times[most] - times[least]) / (most - least)
            bounds.append(times[most] + slope * (bucket.batch - most))
        return max(bounds, default=0.0)

    def _together(self, bucket: Bucket) -> tuple[list[int], Rows]:
        """All samples that the bucket's length takes, in one batch, or in as large ones as eager bears."""
        fitting = self.fitting(bucket)
        size = replace(bucket, batch=min(len(fitting), self._largest[bucket.length]))
        while True:
            groups = [fitting[start : start + size.batch] for start in range(0, len(fitting), size.batch)]
            try:
                rows = self.run(size, groups[0])
                for group in groups[1:]:
                    rows = rows.then(self.run(size, group))
                break
            except EncoderError:
                raise
            except Exception:  # most likely memory
                if size.batch == 1:
                    raise
                size = replace(size, batch=size.batch // 2)
        if size.batch > 1:
            self.run(replace(size, batch=1), fitting[:1])
            self.run(size, groups[0])  # the first run made what later ones find
        return fitting, rows


def timed(runner: GraphRunner, bucket: Bucket, inputs: Inputs, *, tokens: bool = True) -> tuple[TowerOutput, float]:
    """What one run gives, not copied, and its milliseconds."""
    started = time.perf_counter()
    output, _ = runner.run(bucket, inputs, tokens=tokens)
    return output, (time.perf_counter() - started) * 1e3


def _size(bucket: Bucket) -> Bucket:
    """What of a bucket an eager run's time depends on."""
    return bucket if bucket.packed else Bucket(bucket.batch, bucket.length)
