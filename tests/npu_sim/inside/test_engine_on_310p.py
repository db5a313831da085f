"""A 310P has no fused attention and no bfloat16: the engine takes SDPA in float16, and its graphs, by itself."""

import pytest

from encoder.engine import Engine
from encoder.errors import BackendUnavailable
from encoder.graphs import proof
from encoder.settings import EngineSettings
from tests.npu_sim.simulator import Simulator
from tests.support.checkpoints import worst_cosine


def settings(**values: object) -> EngineSettings:
    return EngineSettings.model_validate({"device": "npu", "buckets": [1, 4], **values})


@pytest.mark.parametrize("tower", ["vision", "text"])
def test_it_resolves_to_sdpa_in_float16(tower: str, simulator: Simulator, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "SLOWER_THAN_EAGER", 1e9)
    engine = Engine.load(settings(tower=tower))
    report = engine.report()
    assert (report.device.name, report.model.compute_dtype) == ("Ascend310P3", "float16")
    assert (report.backend.name, report.backend.source, report.backend.rejected) == ("sdpa", "platform", ())
    assert {(graph.state, graph.backend, graph.dtype) for graph in report.graphs} == {("ready", "sdpa", "float16")}
    assert all(check.passed for check in report.self_checks) and report.notes == ()
    on_cpu = Engine.load(EngineSettings.model_validate({"tower": tower, "dtype": "float32", "runner": "eager"}))
    assert worst_cosine(engine.golden_vectors(), on_cpu.golden_vectors()) >= 0.9995
    assert not simulator.calls.fused and not any(call.float_mask for call in simulator.calls.sdpa)


def test_asked_for_by_name_the_fused_operator_is_refused_with_the_reason() -> None:
    with pytest.raises(BackendUnavailable, match="Ascend310P3 has no fused inference attention"):
        Engine.load(settings(attention_backend="ascend_attn"))
