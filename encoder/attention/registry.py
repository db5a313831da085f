"""Names of the attention backends and where they live; a backend is imported when it is first asked for.

To add one: write one file with an `AttentionBackend` and add one line here, or call `register_backend` from outside.
"""

from importlib import import_module

from encoder.attention.backend import AttentionBackend
from encoder.errors import BackendUnavailable

BACKENDS: dict[str, str] = {
    "reference": "encoder.attention.reference:ReferenceAttention",
    "sdpa": "encoder.attention.sdpa:SdpaAttention",
    "varlen": "encoder.attention.varlen:VarlenAttention",
    "flash_attn": "encoder.attention.flash_attn:FlashAttention",
    "ascend_attn": "encoder.attention.ascend_attn:AscendAttention",
}

FALLBACK = "sdpa"


def register_backend(name: str, target: str) -> None:
    """Adds a backend by 'module:Class'; raises ValueError when the name is taken by another one."""
    if BACKENDS.setdefault(name, target) != target:
        raise ValueError(f"attention backend {name!r} is {BACKENDS[name]} already: choose another name")


def backend_class(name: str) -> type[AttentionBackend]:
    """The class behind a name; raises BackendUnavailable for a name that is not known."""
    target = BACKENDS.get(name)
    if target is None:
        known = ", ".join(sorted(BACKENDS))
        raise BackendUnavailable(f"attention backend {name!r} is unknown: use one of {known}")
    module, _, attribute = target.partition(":")
    found: type[AttentionBackend] = getattr(import_module(module), attribute)
    return found
