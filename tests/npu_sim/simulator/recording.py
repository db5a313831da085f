"""Recorded operator calls: what a captured graph replays, and what a capture leaves behind."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from .aliasing import HostArguments, poison


@dataclass(frozen=True)
class RecordedCall:
    """An operator call over fixed addresses. ``results`` are CPU aliases of the memory that takes the new tensors."""

    function: Callable[..., Any]
    host: HostArguments
    results: tuple[torch.Tensor, ...]
    on_replay: Callable[[], None] | None

    def run(self) -> None:
        """Computes again from what the addresses hold now and stores into the same addresses as before."""
        with torch.inference_mode():
            produced = self.host.new_tensors(self.function(*self.host.args, **self.host.kwargs))
            for place, tensor in zip(self.results, produced, strict=True):
                place.copy_(tensor)
        if self.on_replay is not None:
            self.on_replay()


@dataclass
class _CaptureTrace:
    """What the computing during one capture changed, to be undone at its end."""

    before: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # (alias, its content)
    fresh: list[torch.Tensor] = field(default_factory=list)


class Recorder:
    """Keeps every recorded call under the number that the runtime's graph nodes carry.

    A device only notes work while it captures. Shapes are needed here, so the work is done all the same, and undone
    when the capture ends: new tensors then hold poison and changed ones their former content, until the first replay.
    """

    def __init__(self) -> None:
        self._calls: dict[int, RecordedCall] = {}
        self._numbers = itertools.count(1)
        self._traces: dict[int, _CaptureTrace] = {}

    def add(self, call: RecordedCall) -> int:
        """Stores a call and returns its number."""
        number = next(self._numbers)
        self._calls[number] = call
        return number

    def replay(self, number: int) -> None:
        self._calls[number].run()

    def drop(self, number: int) -> None:
        self._calls.pop(number, None)

    def note_before(self, graph: int, written: list[torch.Tensor]) -> None:
        """Remembers the content of the aliases that the next captured call writes into."""
        trace = self._traces.setdefault(graph, _CaptureTrace())
        trace.before.extend((tensor, tensor.clone()) for tensor in written)

    def note_fresh(self, graph: int, results: tuple[torch.Tensor, ...]) -> None:
        """Remembers the memory that the captured call's new tensors live in."""
        self._traces.setdefault(graph, _CaptureTrace()).fresh.extend(results)

    def capture_ended(self, graph: int) -> None:
        """Undoes what computing during the capture changed in memory."""
        trace = self._traces.pop(graph, None)
        if trace is None:
            return
        with torch.inference_mode():
            for tensor, content in reversed(trace.before):
                tensor.copy_(content)
            for tensor in trace.fresh:
                poison(tensor)
