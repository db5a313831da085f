"""Resolution: who asked, what held, what was rejected and why; and that the setting is read once."""

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import ClassVar

import pytest
import torch

from encoder.attention import registry, resolve
from encoder.attention.backend import AttentionBackend, AttentionCall, Capabilities, HeadDims, MaskNeed
from encoder.attention.dispatch import Dispatcher
from encoder.attention.resolve import TowerNeeds, resolve_backend
from encoder.device import Device
from encoder.errors import BackendUnavailable, Unsupported
from encoder.settings import EngineSettings

CPU = Device("cpu", 0, "a test's cpu", "x86_64", 1 << 30)
VISION = TowerNeeds("float32", frozenset({64}), frozenset({MaskNeed.NONE}))
TEXT = TowerNeeds("float32", frozenset({64}), frozenset({MaskNeed.CAUSAL, MaskNeed.KEY_PADDING}))


class OnlyUnmasked(AttentionBackend):
    """A backend from outside the project: no masks, float32, head dim 64 to 128 in steps of 64."""

    name: ClassVar[str] = "only-unmasked"
    capabilities: ClassVar[Capabilities] = Capabilities(
        frozenset({MaskNeed.NONE}), frozenset({"float32"}), HeadDims(exact=(64, 128))
    )

    @classmethod
    def unavailable(cls, device: Device) -> str | None:
        return None if device.kind == "cpu" else f"it runs on the cpu, not on {device.kind}"

    def attend(self, call: AttentionCall) -> torch.Tensor:
        return call.value * 2  # a mark that no right backend leaves


@pytest.fixture
def only_unmasked(monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(registry, "BACKENDS", dict(registry.BACKENDS))
    registry.register_backend("only-unmasked", f"{__name__}:OnlyUnmasked")
    return "only-unmasked"


def settings(**values: object) -> EngineSettings:
    return EngineSettings.model_validate(values)


def test_platform_default_on_the_cpu_is_sdpa_and_says_why() -> None:
    found = resolve_backend(settings(), CPU, TEXT)
    assert (found.name, found.source) == ("sdpa", "platform")
    assert "cpu" in found.reason and found.rejected == ()


def test_server_setting_wins_over_the_model_argument() -> None:
    found = resolve_backend(settings(attention_backend="reference"), CPU, TEXT, model_argument="sdpa")
    assert (found.name, found.source) == ("reference", "server")
    found = resolve_backend(settings(), CPU, TEXT, model_argument="reference")
    assert (found.name, found.source) == ("reference", "model")


def test_unknown_name_names_the_known_ones() -> None:
    with pytest.raises(BackendUnavailable, match=r"'flashy' is unknown.*reference, sdpa"):
        resolve_backend(settings(attention_backend="flashy"), CPU, TEXT)


@pytest.mark.parametrize(
    ("device", "needs", "reason"),
    [
        (dataclasses.replace(CPU, kind="npu"), VISION, "runs on the cpu, not on npu"),
        (CPU, dataclasses.replace(VISION, dtype="bfloat16"), "dtype bfloat16"),
        (CPU, dataclasses.replace(VISION, head_dims=frozenset({72})), "head_dim 72"),
    ],
)
def test_an_explicit_choice_that_cannot_run_is_an_error(
    only_unmasked: str, device: Device, needs: TowerNeeds, reason: str
) -> None:
    with pytest.raises(BackendUnavailable) as caught:
        resolve_backend(settings(attention_backend=only_unmasked), device, needs)
    assert only_unmasked in str(caught.value) and reason in str(caught.value) and device.describe() in str(caught.value)


def test_a_platform_default_that_cannot_serve_is_rejected_with_the_reason(
    only_unmasked: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolve, "platform_order", lambda device: (only_unmasked, "sdpa"))
    assert resolve_backend(settings(), CPU, VISION).name == only_unmasked
    found = resolve_backend(settings(), CPU, TEXT)
    assert found.name == "sdpa"
    assert found.rejected == ((only_unmasked, "takes no causal+key_padding mask, which calls of this tower ask for"),)


def test_what_failed_its_proof_is_not_tried_again() -> None:
    with pytest.raises(BackendUnavailable, match="failed"):
        resolve_backend(settings(), CPU, TEXT, exclude=(("sdpa", "self-check failed"),))


def test_a_demoted_explicit_choice_falls_to_the_platform_and_is_named() -> None:
    found = resolve_backend(settings(attention_backend="reference"), CPU, TEXT, exclude=(("reference", "wrong"),))
    assert (found.name, found.source, found.rejected) == ("sdpa", "platform", (("reference", "wrong"),))


def test_the_decision_is_frozen() -> None:
    found = resolve_backend(settings(), CPU, TEXT)
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.name = "reference"  # type: ignore[misc]


def test_registering_a_taken_name_is_refused() -> None:
    with pytest.raises(ValueError, match="sdpa"):
        registry.register_backend("sdpa", "elsewhere:Other")


def test_calls_outside_the_backend_go_to_the_fallback_and_are_counted(only_unmasked: str) -> None:
    dispatcher = Dispatcher(resolve_backend(settings(attention_backend=only_unmasked), CPU, VISION))
    value = torch.randn(1, 1, 3, 64)
    with dispatcher.forward() as trace:
        assert torch.equal(dispatcher.attend(AttentionCall(value, value, value, 1.0)), value * 2)
    assert (trace.fused, trace.reason) == (1, None)
    with dispatcher.forward() as trace:
        masked = dispatcher.attend(AttentionCall(value, value, value, 1.0, is_causal=True))
        wide = dispatcher.attend(AttentionCall(value[..., :8], value[..., :8], value[..., :8], 1.0))
    assert torch.equal(masked[:, :, 0], value[:, :, 0]) and wide.shape[-1] == 8
    assert trace.reason == "head_dim 8; mask need causal"
    assert dispatcher.counters() == {"fused": 1, "fallback:mask need causal": 1, "fallback:head_dim 8": 1}


def test_strict_mode_makes_the_fallback_an_error(only_unmasked: str) -> None:
    chosen = resolve_backend(settings(attention_backend=only_unmasked), CPU, VISION)
    value = torch.randn(1, 1, 3, 64)
    with pytest.raises(Unsupported, match=r"only-unmasked.*mask need causal.*strict"):
        Dispatcher(chosen, strict=True).attend(AttentionCall(value, value, value, 1.0, is_causal=True))


def test_one_place_reads_the_setting() -> None:
    root = Path(__file__).parents[2]
    readers = [
        path.relative_to(root).as_posix()
        for package in ("encoder", "deployments")
        for path in (root / package).rglob("*.py")
        if ".attention_backend" in path.read_text() and "settings.attention_backend" in path.read_text()
    ]
    assert readers == ["encoder/attention/resolve.py"]


def test_import_encoder_loads_no_heavy_package() -> None:
    code = (
        "import sys, encoder, encoder.errors; print([m for m in ('torch', 'ray', 'transformers') if m in sys.modules])"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"
