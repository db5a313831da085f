"""The one place that decides the attention backend.

Explicit server setting > model/constructor argument > platform default. The result is frozen and handed on; the raw
setting is read here, once, and nowhere else.
"""

from dataclasses import dataclass
from typing import Literal

from encoder.attention.backend import AttentionBackend, Capabilities, MaskNeed
from encoder.attention.registry import FALLBACK, backend_class
from encoder.device import Device, compute_capability
from encoder.errors import BackendUnavailable
from encoder.settings import EngineSettings

Source = Literal["server", "model", "platform"]


@dataclass(frozen=True)
class ResolvedBackend:
    """The decision: which backend, who asked for it, why it holds, and what was rejected with the reason."""

    name: str
    source: Source
    reason: str
    capabilities: Capabilities
    rejected: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class TowerNeeds:
    """What a tower will ask of its backend: dtype name, head dims of its layers, mask needs of its calls."""

    dtype: str
    head_dims: frozenset[int]
    mask_needs: frozenset[MaskNeed]


def platform_order(device: Device) -> tuple[str, ...]:
    """Backends to try on a device when nobody asked for one, best first."""
    if device.kind == "npu":
        return (FALLBACK,) if "310" in device.architecture else ("ascend_attn", FALLBACK)
    if device.kind == "cuda":
        # flash-attn 3 and 4 are made for sm_90 and sm_100; elsewhere torch's own varlen is as good and always there.
        newest_first = ("flash_attn", "varlen") if compute_capability(device)[0] in (9, 10) else ("varlen",)
        return (*newest_first, FALLBACK)
    return (FALLBACK,)


def resolve_backend(
    settings: EngineSettings,
    device: Device,
    needs: TowerNeeds,
    *,
    model_argument: str | None = None,
    exclude: tuple[tuple[str, str], ...] = (),
) -> ResolvedBackend:
    """Decides the backend.

    `exclude`: backends that were tried before and failed their proof, with the reason; they are not tried again.
    Raises BackendUnavailable when an explicit choice cannot run here, or when nothing is left.
    """
    asked: tuple[tuple[Source, str | None], ...] = (("server", settings.attention_backend), ("model", model_argument))
    for source, name in asked:
        if name and name not in dict(exclude):
            return _explicit(name, source, device, needs, exclude)
    rejected = list(exclude)
    for name in platform_order(device):
        if name in dict(exclude):
            continue
        backend = backend_class(name)
        why_not = backend.unavailable(device) or _unfit(backend, needs) or _useless(backend, needs)
        if why_not is None:
            reason = f"platform default for {device.describe()}"
            return ResolvedBackend(name, "platform", reason, backend.capabilities, tuple(rejected))
        rejected.append((name, why_not))
    tried = "; ".join(f"{name}: {why}" for name, why in rejected)
    raise BackendUnavailable(f"no attention backend runs on {device.describe()}: {tried}")


def _explicit(
    name: str, source: Source, device: Device, needs: TowerNeeds, exclude: tuple[tuple[str, str], ...]
) -> ResolvedBackend:
    backend = backend_class(name)
    why_not = backend.unavailable(device) or _unfit(backend, needs)
    if why_not is not None:
        raise BackendUnavailable(
            f"attention backend {name!r} (asked for by the {source}) cannot run on {device.describe()}: {why_not}; "
            "leave the setting empty to let the platform decide"
        )
    reason = f"asked for by the {source} setting" if source == "server" else "asked for by the model's caller"
    return ResolvedBackend(name, source, reason, backend.capabilities, exclude)


def _unfit(backend: type[AttentionBackend], needs: TowerNeeds) -> str | None:
    misfits = {backend.misfit(needs.dtype, head_dim) for head_dim in needs.head_dims} - {None}
    return "does not take " + ", ".join(sorted(str(m) for m in misfits)) if misfits else None


def _useless(backend: type[AttentionBackend], needs: TowerNeeds) -> str | None:
    """A platform default that takes none of the tower's calls would only ever fall back: say no to it at once."""
    missing = needs.mask_needs - backend.capabilities.mask_needs
    if missing:
        return f"takes no {'+'.join(sorted(missing))} mask, which calls of this tower ask for"
    return None
