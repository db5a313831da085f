"""Whole engines on a simulated 910B: what they choose, that it is right, and that faults are found before ready."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import CLIPTokenizer

from encoder.demo import demo_model_path, demo_pictures
from encoder.engine import Engine
from encoder.errors import SelfCheckFailed, Unsupported
from encoder.graphs import proof
from encoder.models import tower as towers
from encoder.settings import EngineSettings
from tests.npu_sim.simulator import Misbehaviour, Simulator
from tests.support.checkpoints import VIT_B_32, oracle, worst_cosine, write_clip
from tests.support.packed_tower import FAMILY, alone, pictures, sharp_vit, write_packed

TEXTS = ["a red circle", "a blue square left of a green triangle", "", "two yellow stars", "a star above a cross"]


@pytest.fixture(autouse=True)
def any_speed_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "SLOWER_THAN_EAGER", 1e9)


@pytest.fixture
def packed_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(towers, "FAMILIES", {**towers.FAMILIES, **FAMILY})
    return write_packed(tmp_path / "packed")


@pytest.fixture
def engines() -> Iterator[list[Engine]]:
    """What is put in here is closed at the end."""
    opened: list[Engine] = []
    yield opened
    for engine in opened:
        engine.close()


def settings(**values: object) -> EngineSettings:
    return EngineSettings.model_validate({"device": "npu", "buckets": [1, 4], **values})


def demo_items(engine: Engine) -> list[object]:
    if engine.tower == "vision":
        return [engine.prepare_image(path.read_bytes()) for path in demo_pictures()[:5]]
    return [engine.prepare_text(text) for text in TEXTS]


def demo_oracle(tower: str, engine: Engine) -> np.ndarray:
    """transformers' own fp32 vectors on the CPU."""
    model = oracle(demo_model_path())
    with torch.inference_mode():
        if tower == "vision":
            items = [engine.prepare_image(path.read_bytes()) for path in demo_pictures()[:5]]
            pixels = engine._tower.collate(items)["pixel_values"]
            return model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output).numpy()
        tokens = CLIPTokenizer.from_pretrained(demo_model_path())(TEXTS, padding=True, return_tensors="pt")
        pooled = model.text_model(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask).pooler_output
        return model.text_projection(pooled).numpy()


def states(engine: Engine) -> set[tuple[str, str, str]]:
    return {(graph.runner, graph.state, graph.reason) for graph in engine.report().graphs}


@pytest.mark.parametrize("dtype", ["auto", "float16"])
@pytest.mark.parametrize("tower", ["vision", "text"])
def test_the_demo_model(tower: str, dtype: str, simulator: Simulator, engines: list[Engine]) -> None:
    engine = Engine.load(settings(tower=tower, dtype=dtype))
    engines.append(engine)
    report = engine.report()
    assert (report.device.name, report.device.visible_count) == ("Ascend910B2", 2)
    assert report.model.compute_dtype == ("bfloat16" if dtype == "auto" else dtype)
    chosen = "ascend_attn" if tower == "vision" else "sdpa"
    assert (report.backend.name, report.backend.source) == (chosen, "platform")
    assert engine.takes_ahead and engine.lanes == 1
    assert states(engine) == {("npu", "ready", "")} and {graph.backend for graph in report.graphs} == {chosen}
    assert report.self_checks and all(check.passed for check in report.self_checks) and report.notes == ()
    if tower == "text":
        refused = "takes no causal+key_padding mask, which calls of this tower ask for"
        assert report.backend.rejected == (("ascend_attn", refused),)
    simulator.calls.clear()
    items = demo_items(engine)
    found = engine.forward(items)
    assert (found.runner, found.attention_backend, found.fallback_reason) == ("npu", chosen, None)
    assert worst_cosine(found.vectors, demo_oracle(tower, engine)) >= 0.999
    assert bool(simulator.calls.fused) == (tower == "vision") == (not simulator.calls.sdpa)
    assert not any(call.float_mask for call in simulator.calls.sdpa)
    eager = Engine.load(settings(tower=tower, dtype=dtype, runner="eager"))
    assert worst_cosine(found.vectors, eager.forward(items).vectors) >= 0.9999
    assert not any(name.startswith("fallback") for name in report.counters)


def test_a_text_tower_may_be_forced_and_says_what_fell_back(simulator: Simulator, engines: list[Engine]) -> None:
    """The fused operator takes no mask: every call goes to SDPA, counted, and none is computed without its mask."""
    engine = Engine.load(settings(tower="text", attention_backend="ascend_attn"))
    engines.append(engine)
    found = engine.forward(demo_items(engine))
    assert (found.attention_backend, found.runner) == ("ascend_attn", "npu")
    assert found.fallback_reason is not None and "mask need causal" in found.fallback_reason
    assert worst_cosine(found.vectors, demo_oracle("text", engine)) >= 0.999
    report = engine.report()
    assert (report.backend.name, report.backend.source) == ("ascend_attn", "server")
    assert sum(count for name, count in report.counters.items() if name.startswith("fallback:mask need causal")) > 0
    assert not simulator.calls.fused and report.counters["fused"] == 0


def test_a_strict_backend_is_an_error_on_a_masked_tower() -> None:
    with pytest.raises(Unsupported, match=r"'ascend_attn' does not take this call .*mask need causal.* strict"):
        Engine.load(settings(tower="text", attention_backend="ascend_attn", strict_backend=True))


def test_a_vit_b_32_of_real_size(tmp_path: Path, simulator: Simulator, engines: list[Engine]) -> None:
    # Of the text tower, which is not looked at, one layer is enough.
    text = {**VIT_B_32["text_config"], "num_hidden_layers": 1, "vocab_size": 512}  # type: ignore[dict-item]
    folder = write_clip(tmp_path / "vit-b-32", {**VIT_B_32, "text_config": text})
    engine = Engine.load(settings(model=str(folder), buckets=[2]))
    engines.append(engine)
    assert engine.resolved.name == "ascend_attn" and states(engine) == {("npu", "ready", "")}
    items = engine._golden[:3]
    found = engine.forward(items)
    assert (found.runner, found.fallback_reason) == ("npu", None) and not simulator.calls.sdpa
    model = oracle(folder)
    with torch.inference_mode():
        pooled = model.vision_model(pixel_values=engine._tower.collate(items)["pixel_values"]).pooler_output
        expected = model.visual_projection(pooled).numpy()
    assert worst_cosine(found.vectors, expected) >= 0.999


def packed_oracle(items: list[np.ndarray]) -> np.ndarray:
    module = sharp_vit(80, 16)
    return np.stack([alone(module, item) for item in items])


def test_a_packed_tower(packed_folder: Path, simulator: Simulator, engines: list[Engine]) -> None:
    engine = Engine.load(settings(model=str(packed_folder)))
    engines.append(engine)
    report = engine.report()
    assert report.backend.name == "ascend_attn" and report.backend.rejected == () and report.notes == ()
    assert [str(graph.bucket) for graph in report.graphs] == [
        "tokens=4,segments=5,max_length=4",
        "tokens=8,segments=5,max_length=8",
        "tokens=16,segments=5,max_length=16",
        "tokens=64,segments=8,max_length=16",
    ]
    assert [graph.state for graph in report.graphs] == ["eager", "ready", "ready", "ready"]
    assert all(check.passed for check in report.self_checks)
    assert {check.mask_need for check in report.self_checks} == {"segments"}
    simulator.calls.clear()
    for lengths in ([5], [9, 7], [7, 9], [16, 16, 16, 16], [1, 1, 1], [16, 3, 9, 11, 2]):
        items = pictures(lengths, seed=sum(lengths))
        found = engine.forward(items)
        assert (found.runner, found.fallback_reason) == ("npu", None)
        assert worst_cosine(found.vectors, packed_oracle(items)) >= 0.999
    assert not simulator.calls.sdpa and {call.layout for call in simulator.calls.fused} == {"TND"}


FAULTS = [
    (Misbehaviour.UNIFORM_AVERAGE, "attention head_dim 80 with ascend_attn/eager bfloat16, mask segments: cosine"),
    (Misbehaviour.NAN_OUTPUT, "attention head_dim 80 with ascend_attn/eager bfloat16, mask segments: cosine nan"),
    (Misbehaviour.OLD_CANN, "RuntimeError: call aclnnFusedInferAttentionScoreV3 failed, error code is 561002"),
]


@pytest.mark.parametrize(("fault", "reason"), FAULTS)
def test_a_fault_at_start_demotes_a_packed_tower(
    fault: Misbehaviour, reason: str, packed_folder: Path, simulator: Simulator, engines: list[Engine]
) -> None:
    said: list[str] = []
    with simulator.misbehaving(fault):
        engine = Engine.load(settings(model=str(packed_folder)), said.append)
        engines.append(engine)
        simulator.calls.clear()
        items = pictures([9, 7, 16, 2], seed=4)
        found = engine.forward(items)
    report = engine.report()
    assert (report.backend.name, report.backend.source) == ("sdpa", "platform")
    (rejected, why), *others = report.backend.rejected
    assert rejected == "ascend_attn" and not others
    assert why.startswith("self-check failed: ") and reason in why
    assert report.notes == (f"attention backend ascend_attn was demoted: {why}",) and report.notes[0] in said
    assert found.attention_backend == "sdpa" and not simulator.calls.fused
    assert worst_cosine(found.vectors, packed_oracle(items)) >= 0.999
    assert {graph.backend for graph in report.graphs} == {"sdpa"}
    assert [graph.state for graph in report.graphs] == ["eager", "ready", "ready", "ready"]


def test_nan_at_start_demotes_the_vision_tower(simulator: Simulator, engines: list[Engine]) -> None:
    with simulator.misbehaving(Misbehaviour.NAN_OUTPUT):
        engine = Engine.load(settings())
        engines.append(engine)
    report = engine.report()
    assert report.backend.name == "sdpa" and report.backend.rejected[0][0] == "ascend_attn"
    assert [check.passed for check in report.self_checks].count(False) == 1
    assert states(engine) == {("npu", "ready", "")} and {graph.backend for graph in report.graphs} == {"sdpa"}
    assert worst_cosine(engine.forward(demo_items(engine)).vectors, demo_oracle("vision", engine)) >= 0.999


def test_a_forced_backend_that_is_wrong_is_demoted_too(simulator: Simulator, engines: list[Engine]) -> None:
    with simulator.misbehaving(Misbehaviour.NAN_OUTPUT):
        engine = Engine.load(settings(attention_backend="ascend_attn"))
        engines.append(engine)
    assert (engine.resolved.name, engine.resolved.source) == ("sdpa", "platform")
    assert engine.resolved.rejected[0][0] == "ascend_attn"


@pytest.mark.parametrize("tower", ["vision", "text"])
def test_an_ignored_mask_harms_nobody(tower: str, simulator: Simulator, engines: list[Engine]) -> None:
    """No mask ever reaches the fused operator, so that one that it ignores past 512 keys cannot be lost there."""
    with simulator.misbehaving(Misbehaviour.MASK_IGNORED_PAST_512):
        engine = Engine.load(settings(tower=tower))
        engines.append(engine)
        found = engine.forward(demo_items(engine))
    assert engine.resolved.name == ("ascend_attn" if tower == "vision" else "sdpa")
    assert worst_cosine(found.vectors, demo_oracle(tower, engine)) >= 0.999
    assert not any(call.mask_shape for call in simulator.calls.fused)


def test_a_fault_after_start_is_not_the_self_checks_to_find_but_nan_is_never_taken_for_health(
    simulator: Simulator, engines: list[Engine]
) -> None:
    engine = Engine.load(settings())
    engines.append(engine)
    engine.probe()
    with simulator.misbehaving(Misbehaviour.NAN_OUTPUT), pytest.raises(Exception, match="NaN or infinity"):
        engine.probe()


def test_when_sdpa_is_wrong_too_the_engine_is_not_ready(monkeypatch: pytest.MonkeyPatch, simulator: Simulator) -> None:
    attend = "encoder.attention.sdpa.SdpaAttention.attend"
    monkeypatch.setattr(attend, lambda self, call: torch.zeros_like(call.query))
    with (
        simulator.misbehaving(Misbehaviour.NAN_OUTPUT),
        pytest.raises(SelfCheckFailed, match="no attention backend computes the right vectors: self-check failed"),
    ):
        Engine.load(settings())


def test_no_memory_for_the_large_graphs(simulator: Simulator, engines: list[Engine]) -> None:
    with simulator.memory_headroom(40 << 20):
        engine = Engine.load(settings(buckets=[1, 4, 512]))
        engines.append(engine)
    *small, large = engine.report().graphs
    assert [graph.state for graph in small] == ["ready", "ready"] and large.state == "disabled"
    assert large.reason.startswith("capture with attention backend 'ascend_attn' failed: NPU out of memory")
    items = demo_items(engine) * 3
    found = engine.forward(items)  # in turns of four
    assert found.runner == "npu"
    assert worst_cosine(found.vectors[:5], demo_oracle("vision", engine)) >= 0.999


def test_limits_of_the_settings_reach_the_graphs(engines: list[Engine]) -> None:
    few = Engine.load(settings(max_graphs=1))
    none = Engine.load(settings(graph_memory_bytes=0))
    engines += [few, none]
    assert [graph.state for graph in few.report().graphs] == ["ready", "eager"]
    assert few.report().graphs[1].reason.startswith("max_graphs allows 1")
    assert all("graph_memory_bytes" in graph.reason for graph in none.report().graphs)
    assert {graph.state for graph in none.report().graphs} == {"eager"} and none.report().items_per_second > 0


def test_the_second_device(simulator: Simulator, engines: list[Engine]) -> None:
    first, second = Engine.load(settings()), Engine.load(settings(device_index=1, claimed_devices=2))
    engines += [first, second]
    assert (second.report().device.index, second.report().device.torch_name) == (1, "npu:1")
    simulator.calls.clear()
    items = demo_items(first)
    assert np.array_equal(first.forward(items).vectors, second.forward(items).vectors)
    devices = [call.device for call in simulator.calls.fused]
    assert devices == sorted(devices) and devices.count(0) == devices.count(1) > 0


@pytest.mark.parametrize(("index", "claimed"), [(0, 3), (2, 1), (2, 3)])
def test_fewer_devices_than_claimed(index: int, claimed: int) -> None:
    with pytest.raises(Unsupported, match=rf"npu device {index} of {claimed} claimed: this process sees 2"):
        Engine.load(settings(device_index=index, claimed_devices=claimed))
