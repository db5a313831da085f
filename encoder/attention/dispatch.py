"""Sends each attention call to the resolved backend, or, when the call is outside it, to the fallback: counted."""

import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MappingProxyType

import torch

from encoder.attention.backend import AttentionCall, Segments
from encoder.attention.registry import FALLBACK, backend_class
from encoder.attention.resolve import ResolvedBackend
from encoder.errors import Unsupported

# By name; see ITEM_BOUNDARIES and WINDOW_BOUNDARIES.
SegmentsByName = Mapping[str, Segments]
NO_SEGMENTS: SegmentsByName = MappingProxyType({})


@dataclass
class CallTrace:
    """What the calls of one forward did: how many the backend took, and how many fell back for which reason.

    `host_lengths`: names of the segments that the backend read on the host, in the order of its calls.
    """

    fused: int = 0
    fallback: Counter[str] = field(default_factory=Counter)
    host_lengths: list[str] = field(default_factory=list)

    def add(self, other: "CallTrace") -> None:
        """Counts the calls of another forward as well."""
        self.fused += other.fused
        self.fallback.update(other.fallback)

    @property
    def reason(self) -> str | None:
        """The reasons in one line, or None when nothing fell back."""
        return "; ".join(sorted(self.fallback)) or None


class Dispatcher:
    """Holds the one decision of an engine and its counters.

    `segments`: boundaries of the packed batch under way by name, set with `forward`; none for fixed-size batches.
    """

    def __init__(self, resolved: ResolvedBackend, *, strict: bool = False) -> None:
        self.resolved = resolved
        self._strict = strict
        self._backend = backend_class(resolved.name)()
        self._fallback = backend_class(FALLBACK)()
        self._trace = CallTrace()
        self._total = CallTrace()
        self._lock = threading.Lock()
        self.segments = NO_SEGMENTS

    @contextmanager
    def forward(self, segments: SegmentsByName = NO_SEGMENTS) -> Iterator[CallTrace]:
        """Around one forward: gives the trace of its calls."""
        self._trace, self.segments = CallTrace(), segments
        try:
            yield self._trace
        finally:
            self.segments = NO_SEGMENTS
            self.count(self._trace)

    def count(self, trace: CallTrace) -> None:
        """Adds a forward's calls to the totals; a replayed graph adds the trace of its capture."""
        with self._lock:
            self._total.add(trace)

    def counters(self) -> dict[str, int]:
        """Totals since the start: 'fused', and 'fallback:<reason>' for each reason."""
        with self._lock:
            return {"fused": self._total.fused} | {f"fallback:{why}": n for why, n in self._total.fallback.items()}

    def attend(self, call: AttentionCall) -> torch.Tensor:
        """[B, H, S, D]. Raises Unsupported in strict mode for a call the backend does not take."""
        why_not = self._backend.refusal(call)
        if why_not is None:
            self._trace.fused += 1
            if call.segments is not None and self._backend.capabilities.host_lengths:
                self._trace.host_lengths.append(call.segments.name)
            return self._backend.attend(call)
        if self._strict:
            raise Unsupported(
                f"attention backend {self.resolved.name!r} does not take this call ({why_not}) and strict-backend is "
                "on: choose another backend, or allow the fallback"
            )
        self._trace.fallback[why_not] += 1
        return self._fallback.attend(call)
