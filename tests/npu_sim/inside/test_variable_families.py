"""Families with pictures of many sizes on a simulated 910B: packed, captured, by the fused operator alone."""

import dataclasses
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from encoder.engine import Engine, RawPixels
from encoder.graphs import proof
from encoder.graphs.captured import Captured
from encoder.graphs.npu import NpuGraphRunner
from encoder.graphs.runner import BOUNDARIES, WINDOWS
from encoder.models.tower import Inputs
from encoder.settings import EngineSettings
from tests.npu_sim.simulator import Simulator
from tests.support.checkpoints import worst_cosine
from tests.support.variable_families import FAMILIES, mllama_oracle, picture, write_mllama

SIZES = [(48, 64), (8, 1200), (1, 1), (110, 150), (500, 700)]


@pytest.fixture(autouse=True)
def any_speed_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "SLOWER_THAN_EAGER", 1e9)


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    """What is put in here is closed at the end."""
    opened: list[Engine] = []
    yield opened
    for engine in opened:
        engine.close()


def load(folder: Path) -> Engine:
    given = {"model": str(folder), "device": "npu", "preprocess": "pil", "buckets": [1, 4], "max_batch_tokens": 512}
    return Engine.load(EngineSettings.model_validate(given))


@pytest.mark.parametrize("name", FAMILIES)
def test_packed_and_captured(name: str, tmp_path: Path, simulator: Simulator, engines: list[Engine]) -> None:
    folder = FAMILIES[name].write(tmp_path / name)
    engine = load(folder)
    engines.append(engine)
    report = engine.report()
    assert report.backend.name == "ascend_attn" and report.backend.rejected == () and report.notes == ()
    assert [(graph.state, graph.reason) for graph in report.graphs] == [("ready", "")] * len(report.graphs)
    assert len(report.graphs) >= 3 and all(check.passed for check in report.self_checks)
    pictures = [picture(height, width) for height, width in SIZES]
    items = [engine.prepare_image(RawPixels(pixels.tobytes(), *pixels.shape)) for pixels in pictures]
    oracle = FAMILIES[name].load(folder)
    expected = np.stack([oracle(pixels)[0] for pixels in pictures])
    simulator.calls.clear()
    for members in (slice(None), slice(None, None, -1), slice(2, 4), slice(1)):
        found = engine.forward(items[members])
        assert (found.runner, found.fallback_reason) == ("npu", None)
        assert worst_cosine(found.vectors, expected[members]) >= 0.999
    assert not simulator.calls.sdpa and {call.layout for call in simulator.calls.fused} == {"TND"}


def test_tiles_under_a_mask(tmp_path: Path, simulator: Simulator, engines: list[Engine]) -> None:
    """Mllama's mask never reaches the fused operator, and SDPA is given it as booleans, captured."""
    folder = write_mllama(tmp_path / "mllama")
    engine = load(folder)
    engines.append(engine)
    report = engine.report()
    assert report.backend.name == "sdpa"
    assert report.backend.rejected == (("ascend_attn", "takes no additive mask, which calls of this tower ask for"),)
    assert [(graph.state, graph.reason) for graph in report.graphs] == [("ready", "")] * 2
    pictures = [picture(height, width) for height, width in SIZES]
    items = [engine.prepare_image(RawPixels(pixels.tobytes(), *pixels.shape)) for pixels in pictures]
    oracle = mllama_oracle(folder)
    simulator.calls.clear()
    found = engine.forward(items)
    assert (found.runner, found.fallback_reason) == ("npu", None)
    assert worst_cosine(found.vectors, np.stack([oracle(pixels)[0] for pixels in pictures])) >= 0.999
    assert simulator.calls.sdpa and not simulator.calls.fused
    assert not any(call.float_mask for call in simulator.calls.sdpa)


class OldLengths(NpuGraphRunner):
    """Hands over the capture's boundaries of one kind, again and again."""

    kind = WINDOWS

    def update(self, captured: Captured, inputs: Inputs) -> None:
        old = torch.tensor(captured.segments[self.kind].host, dtype=torch.int32)
        super().update(captured, {**inputs, self.kind: old})


class OneForAll(NpuGraphRunner):
    """Hands every call the lengths of the first."""

    def update(self, captured: Captured, inputs: Inputs) -> None:
        names = [captured.trace.host_lengths[0]] * len(captured.trace.host_lengths)
        trace = dataclasses.replace(captured.trace, host_lengths=names)
        super().update(dataclasses.replace(captured, trace=trace), inputs)


class OldItems(OldLengths):
    kind = BOUNDARIES


@pytest.mark.parametrize("kind", [OldLengths, OldItems, OneForAll])
def test_lengths_of_the_wrong_kind_are_found_at_start(
    kind: type[NpuGraphRunner],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    engines: list[Engine],
) -> None:
    monkeypatch.setattr("encoder.graphs.npu.NpuGraphRunner", kind)
    engine = load(FAMILIES["qwen2_5_vl"].write(tmp_path / "windows"))
    engines.append(engine)
    states = {(graph.state, graph.reason.split(":")[0]) for graph in engine.report().graphs}
    assert states == {("disabled", "replay differs from eager")}
