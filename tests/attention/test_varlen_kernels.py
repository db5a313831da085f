"""What reaches torch's varlen attention and flash-attn: boundaries, lengths, scale, windows, grouped heads.

On the CPU by stand-ins with the real signatures; on a GPU (marked) by the real kernels.
"""

import dataclasses
import inspect
import itertools

import numpy as np
import pytest
import torch

from encoder.attention.backend import AttentionBackend, AttentionCall, Segments
from encoder.attention.dispatch import Dispatcher
from encoder.attention.flash_attn import FlashAttention, installed_version
from encoder.attention.reference import ReferenceAttention
from encoder.attention.registry import backend_class
from encoder.attention.resolve import ResolvedBackend
from encoder.attention.varlen import VarlenAttention
from encoder.device import Device
from tests.attention import kernels
from tests.attention.test_backends import call_for, written_out

TAKEN = ["none", "causal", "segments", "windows", "segments+causal", "segments+windows", "left window", "causal window"]
REFUSED = {
    "key_padding": "mask need key_padding",
    "causal+key_padding": "mask need key_padding",
    "boolean": "mask need additive",
    "additive": "mask need additive",
}
CLOSE = {torch.bfloat16: 4e-2, torch.float16: 6e-3}


def call_of(need: str, tokens: int, head_dim: int, dtype: torch.dtype) -> AttentionCall:
    base = "segments" if "segments" in need else need if need in ("none", "causal", "windows", *REFUSED) else "none"
    call = call_for(base, tokens, head_dim, dtype)
    if need in ("segments+causal", "causal window"):
        call = dataclasses.replace(call, is_causal=True)
    windows = {"segments+windows": (2, 1), "left window": (4, -1), "causal window": (3, -1)}
    return dataclasses.replace(call, window=windows.get(need, call.window))


@pytest.fixture
def varlen(monkeypatch: pytest.MonkeyPatch) -> VarlenAttention:
    monkeypatch.setattr("torch.nn.attention.varlen.varlen_attn", kernels.torch_varlen)
    return VarlenAttention()


@pytest.fixture(params=list(kernels.FLASH))
def flash(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> FlashAttention:
    kernels.install(monkeypatch, request.param)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    return FlashAttention()


def test_the_stand_in_has_the_signature_of_torch() -> None:
    from torch.nn.attention.varlen import varlen_attn

    real, ours = (inspect.signature(function).parameters.values() for function in (varlen_attn, kernels.torch_varlen))
    assert [(p.name, p.kind, p.default) for p in real] == [(p.name, p.kind, p.default) for p in ours]


@pytest.mark.parametrize("dtype", CLOSE, ids=str)
@pytest.mark.parametrize("head_dim", [64, 72, 80, 88, 128])
@pytest.mark.parametrize("need", TAKEN)
def test_varlen_equals_attention_written_out(
    need: str, head_dim: int, dtype: torch.dtype, varlen: VarlenAttention
) -> None:
    holds(varlen, call_of(need, 17, head_dim, dtype))


@pytest.mark.parametrize("head_dim", [64, 72])
@pytest.mark.parametrize("need", TAKEN)
def test_every_flash_attn_equals_attention_written_out(need: str, head_dim: int, flash: FlashAttention) -> None:
    holds(flash, call_of(need, 17, head_dim, torch.bfloat16))


def holds(backend: AttentionBackend, call: AttentionCall) -> None:
    assert backend.refusal(call) is None
    found = backend.attend(call)
    assert found.shape == call.query.shape and found.dtype == call.query.dtype
    window = call.window and (far(call.window[0]), far(call.window[1]))
    expected = written_out(dataclasses.replace(call, window=window))
    assert np.abs(found.double().numpy() - expected).max() <= CLOSE[call.query.dtype]


def far(side: int) -> int:
    """An open side of a window in plain numbers."""
    return side if side >= 0 else 1000


@pytest.mark.parametrize("need", ["none", "segments", "causal"])
def test_grouped_heads(need: str, varlen: VarlenAttention, flash: FlashAttention) -> None:
    call = call_of(need, 11, 64, torch.bfloat16)
    call = dataclasses.replace(call, query=torch.cat([call.query, call.query.flip(2)], dim=1))
    for backend in (varlen, flash):
        holds(backend, call)


@pytest.mark.parametrize("name", ["varlen", "flash"])
def test_in_a_graph_boundaries_come_from_the_device_and_the_longest_from_the_bucket(
    name: str, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No host lengths there; the tail of fixed-capacity boundaries repeats T; the very tensor is handed on."""
    if name == "flash":
        kernels.install(monkeypatch, "2")
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    seen: list[tuple[torch.Tensor, int]] = []
    attend = kernels.packed_attention

    def watched(*args: object) -> torch.Tensor:
        seen.append((args[3], args[4]))  # type: ignore[arg-type]
        return attend(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(kernels, "packed_attention", watched)
    backend = request.getfixturevalue("varlen") if name == "varlen" else FlashAttention()
    plain = call_of("segments", 14, 64, torch.bfloat16)
    boundaries = torch.tensor([0, 4, 10, 14, 14, 14], dtype=torch.int32)
    captured = dataclasses.replace(plain, segments=Segments(boundaries, None, 9))
    on_host = dataclasses.replace(plain, segments=Segments.from_lengths([4, 6, 4], "cpu"))
    found = backend.attend(captured)
    assert np.abs(found.double().numpy() - written_out(on_host)).max() <= CLOSE[torch.bfloat16]
    assert seen[0][0] is boundaries and seen[0][1] == 9


def test_what_they_do_not_take_is_refused(varlen: VarlenAttention, flash: FlashAttention) -> None:
    for backend in (varlen, flash):
        for need, reason in REFUSED.items():
            assert backend.refusal(call_of(need, 9, 64, torch.bfloat16)) == reason
        assert backend.refusal(call_of("none", 9, 64, torch.float32)) == "dtype float32"
        assert backend.refusal(call_of("none", 9, 66, torch.bfloat16)) == "head_dim 66"
        assert backend.refusal(call_of("none", 9, 264, torch.bfloat16)) == "head_dim 264"
        call = call_of("none", 9, 64, torch.bfloat16)
        short = dataclasses.replace(call, query=call.query[:, :, :4])
        assert backend.refusal(short) == "queries and keys of different lengths"


CHOICES = [
    ((8, 0), ("2", "3", "4"), 2),
    ((8, 9), ("2",), 2),
    ((9, 0), ("2", "3", "4"), 3),
    ((9, 0), ("2", "4"), 4),
    ((9, 0), ("2",), 2),
    ((10, 0), ("2", "3", "4"), 4),
    ((10, 3), ("2", "3", "4"), 2),
    ((12, 0), ("2", "3", "4"), 2),
    ((12, 0), ("3", "4"), None),
    ((8, 0), ("3", "4"), None),
    ((9, 0), (), None),
]


@pytest.mark.parametrize(("capability", "versions", "chosen"), CHOICES)
def test_the_version_that_fits_the_device_is_taken(
    capability: tuple[int, int], versions: tuple[str, ...], chosen: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kernels.install(monkeypatch, *versions)
    found = installed_version(capability)
    assert (None if found is None else found.number) == chosen
    device = Device("cuda", 0, "a test's gpu", f"sm_{capability[0]}{capability[1]}", 1 << 30)
    refused = f"no flash-attn for {device.architecture} is installed"
    assert FlashAttention.unavailable(device) == (refused if chosen is None else None)


def test_version_4_needs_its_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """flash-attn 2 brings the folder of 4 along, which cannot be imported without CUTLASS."""
    kernels.install(monkeypatch, "2", "4", without=("cutlass",))
    found = installed_version((10, 0))
    assert found is not None and found.number == 2


@pytest.mark.parametrize(
    ("kind", "architecture", "reason"),
    [("cpu", "x86_64", "it needs a CUDA device"), ("cuda", "sm_75", "it needs sm_80 or newer, this is sm_75")],
)
def test_devices_that_have_no_kernels(kind: str, architecture: str, reason: str) -> None:
    device = Device(kind, 0, "a test's device", architecture, 1 << 30)
    for backend in (VarlenAttention, FlashAttention):
        assert reason in str(backend.unavailable(device))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("need", [*TAKEN, *REFUSED])
@pytest.mark.parametrize("name", ["varlen", "flash_attn"])
def test_real_kernels_equal_the_reference(name: str, need: str) -> None:
    from encoder.device import open_device

    why_not = backend_class(name).unavailable(open_device("cuda"))
    if why_not is not None:
        pytest.skip(f"{name}: {why_not}")
    to = Dispatcher(ResolvedBackend(name, "server", "a test", backend_class(name).capabilities))
    for dtype, head_dim, tokens in itertools.product(CLOSE, (64, 72, 80, 88, 128), (50, 511, 513)):
        call = call_of(need, tokens, head_dim, dtype)
        segments = call.segments
        there = dataclasses.replace(
            call,
            query=call.query.cuda(),
            key=call.key.cuda(),
            value=call.value.cuda(),
            mask=None if call.mask is None else call.mask.cuda(),
            segments=segments and dataclasses.replace(segments, cu_seqlens=segments.cu_seqlens.cuda()),
        )
        with torch.inference_mode(), to.forward() as trace:
            found = to.attend(there).float().cpu()
        assert trace.reason == REFUSED.get(need)
        error = (found - ReferenceAttention().attend(call).float()).abs().max()
        assert error <= CLOSE[dtype], (dtype, head_dim, tokens)
