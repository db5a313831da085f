"""One tower of one model on one device: load → resolve → capture → check → encode.

`Engine.load` does all that happens before a replica is ready, and raises when the proof fails on every backend.
`prepare_*` may be called from any thread; `forward` from one, or with `alone=False` from one for each of `lanes`, or
from two where the engine `takes_ahead`.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch

from encoder.attention.dispatch import Dispatcher
from encoder.attention.registry import FALLBACK
from encoder.attention.resolve import ResolvedBackend, TowerNeeds, resolve_backend
from encoder.calibration import calibration_of
from encoder.device import Device, open_device
from encoder.devices.cpu import usable_processors
from encoder.errors import EncoderError, SelfCheckFailed, Unsupported
from encoder.graphs.bucketed import BucketedForward, together
from encoder.graphs.eager import EagerRunner
from encoder.graphs.lanes import check_lanes, with_lanes
from encoder.graphs.packing import packed_buckets
from encoder.graphs.plan import BatchPlan
from encoder.graphs.proof import in_one_line
from encoder.graphs.registry import choose_runner
from encoder.graphs.runner import Bucket, Calibration, GraphLimits, RunnerOptions
from encoder.identity import code_digest, describe_model
from encoder.memory import trim
from encoder.models.checkpoint import Checkpoint, find_checkpoint
from encoder.models.halves import PictureTower, TextTower, VisionTower
from encoder.models.tower import Tower, load_tower
from encoder.preprocess.decode import DecodeLimits, DecodePolicy, check_pixels
from encoder.preprocess.isolation import Decoder
from encoder.preprocess.text import TokenizedText
from encoder.reduced import drift_items, reduced_side
from encoder.report import Report, installed_versions
from encoder.selfcheck import CheckResult, check_vectors
from encoder.settings import DecodeSettings, EngineSettings
from encoder.startup_proof import StartupProof

Progress = Callable[[str], None]
# The largest token budget by default. On a CPU larger batches gain nothing, and each budget is run at start.
BATCH_TOKENS = {"cpu": 1024}
BATCH_TOKENS_ELSEWHERE = 16384


def quiet(message: str) -> None:
    """Progress that says nothing."""


@dataclass(frozen=True)
class RawPixels:
    """Decoded pixels: uint8, height * width * channels bytes, channels last."""

    data: bytes
    height: int
    width: int
    channels: int


@dataclass(frozen=True)
class ForwardResult:
    """Vectors float32 [n, D], pooled and projected, not yet normalised; and how they were computed.

    `tokens`: the patch features of each item, float32 [t, F], only where they were asked for.
    """

    vectors: np.ndarray
    attention_backend: str
    runner: str
    fallback_reason: str | None
    forward_ms: float
    tokens: list[np.ndarray] = field(default_factory=list)


class Engine:
    """See the module; make one with `Engine.load`."""

    def __init__(self, settings: EngineSettings, tower: Tower[Any], checkpoint: Checkpoint, device: Device) -> None:
        self._tower = tower
        self._device = device
        self._decoder = _decoder(settings.decode, reduced_side(tower) if settings.preprocess == "reduced" else 0)
        self._dtype_name = device.best_dtype if settings.dtype == "auto" else settings.dtype
        self._buckets, self._text_lengths = settings.buckets, settings.text_lengths
        self._max_batch_tokens = settings.max_batch_tokens
        self._options = RunnerOptions(
            identity=(tower.spec.family, tower.spec.tower, checkpoint.revision, code_digest(tower)),
            cache=settings.cache_dir,
            int8=self._calibration(settings),
        )
        self._startup: list[tuple[str, float]] = []
        self._checks: list[CheckResult] = []
        self._notes: list[str] = []
        self._counters: Counter[str] = Counter()
        self._lock = threading.Lock()
        self._golden = tower.golden_items()
        self._dispatcher: Dispatcher
        self._forward: BucketedForward
        self._plan: BatchPlan
        self.info = describe_model(
            tower, checkpoint, settings, self._decoder.policy, self._dtype_name, self._options.int8
        )

    @classmethod
    def load(cls, settings: EngineSettings, progress: Progress = quiet) -> "Engine":
        """Everything up to ready. Raises CheckpointError, BackendUnavailable, Unsupported or SelfCheckFailed."""
        started = time.perf_counter()
        device = open_device(settings.device, settings.device_index, settings.claimed_devices)
        if settings.threads is not None:
            torch.set_num_threads(settings.threads)
        progress(f"load {settings.model} ({settings.tower})")
        checkpoint = find_checkpoint(settings.model, revision=settings.revision, offline=settings.offline)
        with ThreadPoolExecutor(1) as beside:  # hashing leaves Python alone, and imports keep but one core busy
            revision = beside.submit(lambda: checkpoint.revision)
            tower = load_tower(checkpoint, settings)
            revision.result()
        engine = cls(settings, tower, checkpoint, device)
        engine._startup.append(("load", (time.perf_counter() - started) * 1e3))
        engine._make_ready(settings, progress)
        return engine

    @property
    def tower(self) -> Literal["vision", "text"]:
        """Which half this engine serves."""
        return self._tower.spec.tower

    @property
    def resolved(self) -> ResolvedBackend:
        """The backend in force."""
        return self._dispatcher.resolved

    def prepare_image(self, source: bytes | memoryview | RawPixels) -> Any:
        """A picture as the tower's item, mostly uint8 [3, H, W]. Raises InvalidImage; Unsupported on a text engine."""
        if not isinstance(self._tower, VisionTower):
            raise Unsupported(f"{self.info.name}: this engine serves the text tower and takes no images")
        if isinstance(source, RawPixels):
            limits, policy = self._decoder.limits, self._decoder.policy
            pixels = check_pixels(source.data, source.height, source.width, source.channels, limits, policy)
        else:
            pixels = self._decoder.decode(source)
        return self._tower.prepare(pixels)

    def prepare_text(self, text: str, overflow: Literal["truncate", "refuse"] = "truncate") -> TokenizedText:
        """A text as tokens. Raises InvalidText; Unsupported on a vision engine."""
        if not isinstance(self._tower, TextTower):
            raise Unsupported(f"{self.info.name}: this engine serves the vision tower and takes no texts")
        return self._tower.pipeline.encode(text, overflow=overflow)

    def plan_batch(self, items: Sequence[Any]) -> list[int]:
        """Places of the prepared items, in the order they wait, that should be forwarded together now; any thread."""
        return self._plan.choose([self._tower.length_of(item) for item in items])

    def grid_of(self, item: Any) -> tuple[int, ...]:
        """Shape of a prepared item's patch features, e.g. rows and columns; empty when the tower gives none."""
        return self._tower.grid_of(item)

    @property
    def lanes(self) -> int:
        """How many forwards may run side by side, each on its share of the device."""
        return self._forward.lanes

    @property
    def takes_ahead(self) -> bool:
        """Whether a batch can be given while the one before is computed, and crosses to the device meanwhile."""
        return self._forward.takes_ahead

    def shares_processors(self, preparing: int) -> bool:
        """Whether a forward, and as well so many threads that prepare items, can keep all processors there are busy."""
        return self._device.kind == "cpu" and usable_processors() <= min(torch.get_num_threads(), preparing)

    @property
    def lane_batch(self) -> int:
        """Items that one of them takes at most without taking turns."""
        return self._forward.largest

    def forward(self, items: Sequence[Any], *, tokens: bool = False, alone: bool = True) -> ForwardResult:
        """Vectors of prepared items, with their patch features when `tokens` asks for them.

        `alone`: nothing else runs meanwhile, and the whole device is theirs; else at most `lanes` run at a time.
        More than the largest bucket are taken in turns. Raises Unsupported for features of a tower that gives none.
        """
        if tokens and not self.info.token_dimensions:
            raise Unsupported(f"{self.info.name}: the {self.tower} tower gives no patch features: ask for vectors")
        started = time.perf_counter()
        largest = self.lane_batch * (self.lanes if alone else 1)
        parts = [
            self._forward.run(items[start : start + largest], tokens=tokens, alone=alone)
            for start in range(0, len(items), largest)
        ]
        with self._lock:
            self._counters["batches"] += len(parts)
            self._counters["items"] += len(items)
        encoded = together(parts)
        return ForwardResult(
            vectors=encoded.vectors,
            attention_backend=self.resolved.name,
            runner=parts[-1].runner,
            fallback_reason=encoded.trace.reason,
            forward_ms=(time.perf_counter() - started) * 1e3,
            tokens=encoded.tokens,
        )

    def probe(self) -> None:
        """A real forward of one golden item; raises EncoderError when its vector is not finite. On a lane's thread."""
        vectors = self._forward.run(self._golden[:1], alone=False).vectors
        if not np.isfinite(vectors).all():
            raise EncoderError("the health probe's forward gave NaN or infinity")

    def golden_vectors(self) -> np.ndarray:
        """Vectors float32 [n, D] of the golden inputs by the chosen path. Forward thread only."""
        return self._forward.run(self._golden).vectors

    def count(self, counter: str, amount: int = 1) -> None:
        """Adds to a counter of the report; any thread."""
        with self._lock:
            self._counters[counter] += amount

    def report(self) -> Report:
        """All that was chosen, proved and counted so far; any thread."""
        with self._lock:
            counters = dict(self._counters)
        return Report(
            model=self.info,
            device=self._device,
            versions=installed_versions(),
            backend=self.resolved,
            fallback=FALLBACK,
            graphs=self._forward.records,
            self_checks=tuple(self._checks),
            startup=tuple(self._startup),
            items_per_second=self._forward.items_per_second(),
            counters=counters | self._dispatcher.counters() | self._forward.counters | self._decoder.counters(),
            notes=tuple(self._notes),
        )

    def start_decoders(self, count: int) -> None:
        """Starts decode workers ahead of the first picture that needs one, where the settings allow workers."""
        if self.tower == "vision":
            self._decoder.start(count)

    def close(self) -> None:
        """Gives back what the buckets hold, and ends the decode workers."""
        self._decoder.close()
        self._forward.release()

    def _make_ready(self, settings: EngineSettings, progress: Progress) -> None:
        needs = TowerNeeds(self._dtype_name, self._tower.spec.head_dims, self._tower.spec.mask_needs)
        with self._stage("reference", progress):
            proof = StartupProof(self._tower, self._golden) if settings.self_check else None
        with self._stage("move to device", progress):
            self._tower.module.to(self._device.torch_name, self._dtype)
        demoted: list[tuple[str, str]] = []
        while True:
            resolved = resolve_backend(settings, self._device, needs, exclude=tuple(demoted))
            self._build(settings, resolved)
            fault = self._prepare(proof, progress)
            if fault is None:
                self._measure_drift(progress)
                self._settle()
                return
            demoted.append((resolved.name, fault))
            self._notes.append(f"attention backend {resolved.name} was demoted: {fault}")
            progress(self._notes[-1])
            self._forward.release()
            if resolved.name == FALLBACK:
                raise SelfCheckFailed(f"{self.info.name}: no attention backend computes the right vectors: {fault}")

    def _measure_drift(self, progress: Progress) -> None:
        """What decoding at a reduced scale costs goes into the report; raises SelfCheckFailed when it is too much."""
        if not self._decoder.policy.reduced_side or not isinstance(self._tower, PictureTower):
            return
        with self._stage("measure reduced decoding", progress):
            whole, reduced = (self._forward.run(items).vectors for items in drift_items(self._tower, self._decoder))
            failed = self._first_failed([
                check_vectors(
                    reduced, whole, tower=self.tower, backend=self.resolved.name, runner=self._forward.runner_name,
                    dtype="reduced", mask_need="none", detail="reduced decoding against whole",
                )
            ])  # fmt: skip
        if failed is not None:
            raise SelfCheckFailed(f"{self.info.name}: {failed.describe()}: use preprocess torch")

    def _settle(self) -> None:
        """Ready: what only the start needed is given back, the weights themselves where no batch will run eager."""
        self._notes.extend(note for note in self._forward.notes if note not in self._notes)
        self._forward.settle()
        self._plan = BatchPlan(self._forward.records)
        if self._forward.never_eager and self._forward.runner_name == "openvino":
            self._tower.module.to("meta")  # the compiled model has weights of its own
        trim()

    def _calibration(self, settings: EngineSettings) -> Calibration | None:
        if settings.quantization == "none":
            return None
        if self._tower.spec.tower != "vision":
            raise Unsupported("int8 is for the vision tower: serve the text tower with quantization none")
        return calibration_of(settings.calibration, self.prepare_image)

    def _build(self, settings: EngineSettings, resolved: ResolvedBackend) -> None:
        self._dispatcher = Dispatcher(resolved, strict=settings.strict_backend)
        runner_type, notes = choose_runner(settings.runner, self._device)
        if self._options.int8 and runner_type.name != "openvino":
            raise Unsupported(
                f"int8 runs on OpenVINO, and this engine runs on {self._device.describe()} with {runner_type.name}"
                f"{''.join('; ' + note for note in notes)}: use quantization none"
            )
        self._notes.extend(note for note in notes if note not in self._notes)
        eager = EagerRunner(self._tower, self._dispatcher, self._device, self._dtype)
        runner = runner_type(self._tower, self._dispatcher, self._device, self._dtype, self._options)
        limits = GraphLimits(settings.max_graphs, settings.graph_memory_bytes)
        check_lanes(runner_type, settings.lanes, torch.get_num_threads(), packed=self._tower.spec.packed)
        self._forward = BucketedForward(runner, eager, with_lanes(self._all_buckets(), settings.lanes), limits)

    def _prepare(self, proof: StartupProof | None, progress: Progress) -> str | None:
        """Checks attention, captures, checks vectors; gives why this backend cannot serve, or None when it can.

        A backend that raises has failed its proof like one that computes wrong values. Without a proof it raises.
        """
        name = self.resolved.name
        try:
            failed = None
            if proof is not None:
                with self._stage(f"check attention {name}", progress):
                    failed = self._first_failed(proof.attention(self._dispatcher, self._device, self._dtype))
            if failed is None:
                with self._stage(f"capture {self._forward.runner_name}", progress):
                    self._forward.prepare(self._golden, progress, proof.truth if proof is not None else None)
            if failed is None and self._options.int8 and not self._forward.any_ready:
                raise SelfCheckFailed(
                    f"{self.info.name}: int8 does not compute the right vectors: {self._forward.records[0].reason}: "
                    "calibrate on more pictures like yours, or use quantization none"
                )
            if failed is None and proof is not None:
                with self._stage(f"self-check {name}", progress):
                    failed = self._first_failed(proof.vectors(self._forward, name))
        except EncoderError:
            raise
        except Exception as error:
            if proof is None:
                raise
            return f"self-check failed: {type(error).__name__}: {in_one_line(error)}"
        return None if failed is None else f"self-check failed: {failed.describe()}"

    def _first_failed(self, checks: list[CheckResult]) -> CheckResult | None:
        """All that were made go into the report."""
        self._checks.extend(checks)
        return next((check for check in checks if not check.passed), None)

    @property
    def _dtype(self) -> torch.dtype:
        dtype: torch.dtype = getattr(torch, self._dtype_name)
        return dtype

    def _all_buckets(self) -> list[Bucket]:
        spec = self._tower.spec
        longest = spec.max_tokens
        limit = self._max_batch_tokens or BATCH_TOKENS.get(self._device.kind, BATCH_TOKENS_ELSEWHERE)
        if spec.packed:
            return packed_buckets(
                longest, self._buckets, limit=limit, multiple=spec.token_multiple, windows=spec.windows
            )
        if not longest:
            smallest = self._buckets[0]
            within = [batch for batch in self._buckets if batch == smallest or batch * spec.item_tokens <= limit]
            return [Bucket(batch) for batch in within]
        shorter = () if self._tower.spec.fixed_length else self._text_lengths
        lengths = [length for length in shorter if length < longest] + [longest]
        return [Bucket(batch, length) for batch in self._buckets for length in lengths]

    @contextmanager
    def _stage(self, name: str, progress: Progress) -> Iterator[None]:
        progress(name)
        started = time.perf_counter()
        yield
        self._startup.append((name, (time.perf_counter() - started) * 1e3))


def _decoder(settings: DecodeSettings, least_side: int) -> Decoder:
    limits = DecodeLimits(settings.max_image_bytes, settings.max_pixels, settings.max_side)
    policy = DecodePolicy(settings.apply_exif_orientation, settings.background, settings.allow_truncated, least_side)
    return Decoder(limits, policy, settings.isolation, settings.time_limit_s)
