"""Makes every bucket ready before the first request, and proves it: a graph must give what eager gives.

A graph knows addresses and baked-in values, so what it was captured with proves nothing. Each bucket is replayed with
two batches it has not seen, all buckets once from small to large and once back, and at the end no vector that an
earlier replay gave may have changed. A packed bucket sees other boundaries each time.

What eager gives is asked once for each item, see `answers`. Eager runs at a bucket's own size where a replay differs,
where it may be the quicker of the two, and where it will serve.

Where graphs have kernels of their own, as OpenVINO's, the two round apart, and in a deep model by more than the bound
between them. Then float32 judges: a replay that is as near to it as eager is, is as right as eager.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np

from encoder.errors import EncoderError
from encoder.graphs.answers import EagerAnswers, Rows, timed
from encoder.graphs.batches import bucket_inputs, fits
from encoder.graphs.eager import EagerRunner
from encoder.graphs.runner import Bucket, GraphLimits, GraphRecord, GraphRunner
from encoder.models.tower import Inputs, TowerOutput
from encoder.outputs import normalize_rows
from encoder.selfcheck import compare_rows

# dtype: (least cosine, greatest absolute error on vectors of length 1) of a replay against eager
GRAPH_THRESHOLDS = {
    "float32": (0.999999, 1e-5),
    "bfloat16": (0.9999, 1e-2),
    "float16": (0.9999, 1e-2),
    "int8": (0.99, 5e-2),
}
# How much farther from float32 than eager's a replay may be; of worst rows, which scatter.
AS_NEAR_AS_EAGER = 1.25
SLOWER_THAN_EAGER = 1.10
TIMED_AGAIN = 3
# Rounds in which all buckets are timed once more, as many of them as fit into the seconds.
ROUNDS = 3
ROUNDS_SECONDS = 1.3
MIB = 1024 * 1024

Progress = Callable[[str], None]


@dataclass(frozen=True)
class Trial:
    """Places of samples that make a batch, its inputs for the graph, and what eager says of them."""

    places: tuple[int, ...]
    inputs: Inputs
    expected: Rows


class Difference(NamedTuple):
    """Worst cosine and greatest absolute error of replayed rows of length 1; why that is too much, or None."""

    cosine: float
    error: float
    fault: str | None


class BucketProof:
    """Captures and proves the buckets of `records`, and notes there what came out. One use, at start."""

    def __init__(
        self,
        runner: GraphRunner,
        eager: EagerRunner,
        records: dict[Bucket, GraphRecord],
        samples: Sequence[Any],
        progress: Progress,
        truth: Rows | None = None,
    ) -> None:
        self._truth = truth
        self._runner = runner
        self._eager = eager
        self._records = records
        self._samples = samples
        self._answers = EagerAnswers(eager, samples, list(records))
        self._lengths = [runner.tower.length_of(item) for item in samples]
        self._progress = progress
        self._given: list[tuple[Bucket, Rows, Trial]] = []

    def run(self, limits: GraphLimits) -> None:
        """Raises EncoderError, as a strict backend does, and RuntimeError when not even eager serves any bucket."""
        if self._runner.name == self._eager.name:
            self._leave_eager(self._records, "no graphs here")
        else:
            self._capture_all(limits)
            first: dict[Bucket, Trial] = {}
            for bucket in self._ready():
                self._progress(f"prove {self._runner.name} {bucket}")
                trial = self._trial(bucket, self._places(bucket, 0))
                if trial is not None:
                    first[bucket] = trial
                    self._prove(bucket, trial)
            for bucket in reversed(self._ready()):
                trial = self._second(bucket, first[bucket])
                if trial is not None:
                    self._prove(bucket, trial)
                    self._compare_speed(bucket, first[bucket])
            self._hold_to_what_was_given()
            self._time_in_rounds(first)
        self._time_eager()

    def _capture_all(self, limits: GraphLimits) -> None:
        """The largest first, whose memory the smaller ones then share; but too many graphs are the larger ones."""
        if not self._runner.packed:
            packed = [bucket for bucket in self._records if bucket.packed]
            self._leave_eager(packed, f"graph runner {self._runner.name} takes no packed batches")
        self._leave_eager(
            [bucket for bucket in self._ready() if len(self._answers.fitting(bucket)) < 2],
            "fewer than two golden items fit it, which its proof needs",
        )
        self._leave_eager(
            self._ready()[limits.max_graphs :],
            f"max_graphs allows {limits.max_graphs} graphs, and there are smaller ones",
        )
        held = 0
        for bucket in reversed(self._ready()):
            self._capture(bucket)
            record = self._records[bucket]
            if record.state != "ready":
                continue
            if limits.memory_bytes is not None and held + record.memory_bytes > limits.memory_bytes:
                self._runner.release(bucket)
                self._leave_eager(
                    [bucket],
                    f"its graph takes {record.memory_bytes / MIB:.1f} MiB, and graph_memory_bytes leaves "
                    f"{(limits.memory_bytes - held) / MIB:.1f} MiB",
                )
                self._note(bucket, memory_bytes=0)
                continue
            held += record.memory_bytes

    def _capture(self, bucket: Bucket) -> None:
        self._progress(f"capture {self._runner.name} {bucket}")
        places = self._places(bucket, 2)
        inputs = self._inputs(bucket, places[:1] if bucket.packed else places)
        started = time.perf_counter()
        try:
            memory = self._runner.capture(bucket, inputs)
        except EncoderError:
            raise
        except Exception as error:  # whatever a device raises at capture: this bucket is served eager, and says why
            backend = self._runner.dispatcher.resolved.name
            self._leave_eager([bucket], f"capture with attention backend {backend!r} failed: {in_one_line(error)}")
            self._progress(f"{bucket}: {self._records[bucket].reason}")
            return
        self._note(bucket, capture_ms=(time.perf_counter() - started) * 1e3, memory_bytes=memory)

    def _second(self, bucket: Bucket, first: Trial) -> Trial | None:
        """Other inputs. Packed: the same items backwards, so that the token count stays and the boundaries do not."""
        places = self._places(bucket, 1)
        if bucket.packed:
            backwards = first.places[::-1]
            moved = [self._lengths[i] for i in backwards] != [self._lengths[i] for i in first.places]
            places = backwards if moved else places[:-1] or places
            if set(places) <= set(first.places):
                rows = [first.places.index(place) for place in places]
                return Trial(places, self._inputs(bucket, places), first.expected.take(rows))
        return self._trial(bucket, places)

    def _places(self, bucket: Bucket, start: int) -> tuple[int, ...]:
        """Samples that fill a bucket, round and round from the one at `start`; none when none fits."""
        fitting = self._answers.fitting(bucket)
        places: list[int] = []
        while fitting:
            place = fitting[(start + len(places)) % len(fitting)]
            if not fits(bucket, [self._lengths[i] for i in (*places, place)]):
                break
            places.append(place)
        return tuple(places)

    def _inputs(self, bucket: Bucket, places: Sequence[int]) -> Inputs:
        return bucket_inputs(self._runner.tower, [self._samples[place] for place in places], bucket)

    def _trial(self, bucket: Bucket, places: tuple[int, ...]) -> Trial | None:
        """With eager's answer; None, and the bucket serves no more, when eager has none."""
        try:
            ask = self._answers.run if bucket.packed else self._answers.rows
            return Trial(places, self._inputs(bucket, places), ask(bucket, places))
        except EncoderError:
            raise
        except Exception as error:
            self._serve_no_more(bucket, error)
            return None
        finally:
            self._note(bucket, eager_ms=self._answers.milliseconds(bucket))

    def _at_own_size(self, bucket: Bucket, trial: Trial) -> Trial | None:
        """The same batch with what eager gives for it at the bucket's size; None when eager fails there."""
        try:
            return replace(trial, expected=self._answers.run(bucket, trial.places))
        except EncoderError:
            raise
        except Exception as error:  # most likely memory; the graph is right, and what it is right by came in parts
            self._progress(f"{bucket}: {_fails(error)}")
            return None
        finally:
            self._note(bucket, eager_ms=self._answers.milliseconds(bucket))

    def _prove(self, bucket: Bucket, trial: Trial) -> None:
        """One replay; the quickest of all is what is reported."""
        replay = self._replay(bucket, trial)
        if replay is None:
            return
        replayed, replay_ms = replay
        found = self._rows(replayed, trial.places)
        difference = self._compare(found, trial.expected, trial.places)
        if difference.fault is not None and not bucket.packed:
            # Kernels may round by the size of a batch, and in a deep model by more than the bound: then eager's do too.
            same_size = self._at_own_size(bucket, trial)
            if same_size is not None:
                trial = same_size
                difference = self._compare(found, trial.expected, trial.places)
        self._note_difference(bucket, difference)
        if difference.fault is not None:
            self._disable(bucket, f"replay differs from eager: {difference.fault}")
            return
        self._note_time(bucket, replay_ms)
        self._given.append((bucket, found, trial))

    def _replay(self, bucket: Bucket, trial: Trial, *, tokens: bool = True) -> tuple[TowerOutput, float] | None:
        """What it gives, and its milliseconds; None, and the bucket disabled, where it fails, as it would later."""
        try:
            return timed(self._runner, bucket, trial.inputs, tokens=tokens)
        except Exception as error:
            self._disable(bucket, f"replay failed: {in_one_line(error)}")
            return None

    def _note_time(self, bucket: Bucket, replay_ms: float) -> None:
        known = self._records[bucket].replay_ms
        self._note(bucket, replay_ms=min(replay_ms, known or replay_ms))

    def _rows(self, output: TowerOutput, places: Sequence[int]) -> Rows:
        items = [self._samples[place] for place in places]
        return Rows.of(self._runner.tower, items, output)

    def _compare(self, found: Rows, expected: Rows, places: Sequence[int]) -> Difference:
        """The worst of the vectors and the features; an item's features are held together as one long vector."""
        truth = self._truth.take(places) if self._truth is not None else None
        parts = [self._difference(found.vectors, expected.vectors, truth.vectors if truth is not None else None)]
        if len(found.tokens) != len(expected.tokens):
            parts.append(_not_alike(f"features of {len(found.tokens)} items, not of {len(expected.tokens)}"))
        for place, (ours, theirs) in enumerate(zip(found.tokens, expected.tokens, strict=False)):
            exact = truth.tokens[place].reshape(1, -1) if truth is not None else None
            part = self._difference(ours.reshape(1, -1), theirs.reshape(1, -1), exact)
            parts.append(part._replace(fault=part.fault and f"features: {part.fault}"))
        fault = next((part.fault for part in parts if part.fault is not None), None)
        return _worst(Difference(1.0, 0.0, fault), *parts)

    def _difference(self, found: np.ndarray, expected: np.ndarray, truth: np.ndarray | None) -> Difference:
        if found.shape != expected.shape:
            return _not_alike(f"shape {found.shape}, not {expected.shape}")
        cosine, error = compare_rows(normalize_rows(found), normalize_rows(expected))
        least, most = GRAPH_THRESHOLDS[self._runner.precision]
        holds = cosine >= least and error <= most
        if not holds and truth is not None and self._runner.precision == self._eager.precision:
            holds = _as_near(found, expected, truth)
        return Difference(cosine, error, None if holds else f"cosine {cosine:.6f}, max error {error:.1e}")

    def _note_difference(self, bucket: Bucket, found: Difference) -> None:
        record = self._records[bucket]
        if record.worst_cosine is not None and record.max_abs_error is not None:
            found = _worst(found, Difference(record.worst_cosine, record.max_abs_error, None))
        self._note(bucket, worst_cosine=found.cosine, max_abs_error=found.error)

    def _hold_to_what_was_given(self) -> None:
        """A vector belongs to who asked for it: a later replay that writes into it has handed out its own buffer."""
        for bucket, found, trial in self._given:
            fault = self._compare(found, trial.expected, trial.places).fault
            if fault is not None and self._records[bucket].state == "ready":
                self._disable(bucket, f"a later replay changed vectors that were given away: {fault}")

    def _compare_speed(self, bucket: Bucket, trial: Trial) -> None:
        """A single measurement may be disturbed, so before a bucket is disabled both are timed again.

        Eager at this size is not timed where, by what it takes at others, it cannot be the quicker one.
        """
        record = self._records[bucket]
        if record.state != "ready" or record.device_ms * SLOWER_THAN_EAGER <= self._answers.at_least(bucket):
            return
        if not record.eager_ms and self._at_own_size(bucket, trial) is None:
            return
        for _ in range(TIMED_AGAIN):
            if not self._slower(bucket):
                return
            again = self._at_own_size(bucket, trial)
            if again is not None:
                self._prove(bucket, again)
        if self._slower(bucket):
            record = self._records[bucket]
            shared = f" on each of {bucket.lanes} lanes" if bucket.lanes > 1 else ""
            self._disable(bucket, f"replay takes {record.replay_ms:.1f} ms{shared}, eager {record.eager_ms:.1f} ms")

    def _time_in_rounds(self, trials: Mapping[Bucket, Trial]) -> None:
        """By these times batches are planned for good: a bucket that was disturbed twice would be avoided for good.

        Without features, which few ask for. Whole rounds alone: some buckets timed more often than others look quicker.
        """
        until = time.perf_counter() + ROUNDS_SECONDS
        for _ in range(ROUNDS):
            buckets = [bucket for bucket in self._ready() if not bucket.packed]
            if time.perf_counter() + sum(self._records[bucket].replay_ms for bucket in buckets) / 1e3 > until:
                return
            for bucket in buckets:
                replay = self._replay(bucket, trials[bucket], tokens=False)
                if replay is not None:
                    self._note_time(bucket, replay[1])

    def _slower(self, bucket: Bucket) -> bool:
        record = self._records[bucket]
        return record.state == "ready" and record.device_ms > record.eager_ms * SLOWER_THAN_EAGER

    def _time_eager(self) -> None:
        """Runs once what will be served eager: its first request then finds it warm, or it is known not to serve."""
        for bucket, record in list(self._records.items()):
            places = self._places(bucket, 0)
            if record.state == "ready" or not record.serves or record.eager_ms or not places:
                continue
            self._progress(f"warm up {bucket}")
            try:
                self._answers.run(bucket, places)
            except EncoderError:
                raise
            except Exception as error:
                self._serve_no_more(bucket, error)
            self._note(bucket, eager_ms=self._answers.milliseconds(bucket))
        if not any(record.serves for record in self._records.values()):
            smallest = next(iter(self._records.values()))
            raise RuntimeError(f"no batch can be run, not even {smallest.bucket}: {smallest.reason}")

    def _ready(self) -> list[Bucket]:
        """Smallest first."""
        return [bucket for bucket, record in self._records.items() if record.state == "ready"]

    def _leave_eager(self, buckets: Sequence[Bucket] | dict[Bucket, GraphRecord], reason: str) -> None:
        for bucket in buckets:
            self._note(bucket, state="eager", reason=reason)

    def _serve_no_more(self, bucket: Bucket, error: Exception) -> None:
        """Most likely for want of memory; smaller batches may do."""
        reason = self._records[bucket].reason
        self._disable(bucket, f"{reason}{reason and '; '}{_fails(error)}")
        self._note(bucket, serves=False)

    def _disable(self, bucket: Bucket, reason: str) -> None:
        self._note(bucket, state="disabled", reason=reason)
        self._progress(f"{bucket}: {reason}")
        self._runner.release(bucket)

    def _note(self, bucket: Bucket, **known: Any) -> None:
        self._records[bucket] = replace(self._records[bucket], **known)


def _as_near(found: np.ndarray, eager: np.ndarray, truth: np.ndarray) -> bool:
    """Whether the rows are no farther from float32's than eager's are. How far that may be, the self-check says."""
    exact = normalize_rows(truth)
    cosine, eager_cosine = (compare_rows(normalize_rows(rows), exact)[0] for rows in (found, eager))
    return 1 - cosine <= AS_NEAR_AS_EAGER * (1 - eager_cosine)


def _not_alike(fault: str) -> Difference:
    return Difference(float("nan"), float("nan"), fault)


def _worst(first: Difference, *others: Difference) -> Difference:
    """With the first one's fault; NaN is worse than any number."""
    found = (first, *others)
    cosine, error = np.min([one.cosine for one in found]), np.max([one.error for one in found])
    return Difference(float(cosine), float(error), first.fault)


def _fails(error: Exception) -> str:
    return f"eager fails at this size: {in_one_line(error)}"


def in_one_line(error: Exception) -> str:
    """An error's first line, and, where that is a code of torch_npu's, the line that explains it."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    if not lines:
        return type(error).__name__
    told = [line for line in lines[1:] if not line.startswith("[ERROR]")] if "error code is" in lines[0] else []
    return ": ".join([lines[0], *told[:1]])
