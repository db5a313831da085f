"""Puts the simulated kernels in the place of torch_npu's device kernels."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from .aliasing import is_npu
from .calls import CallLog, SdpaCall
from .execution import Executor

DEVICE_KEY = "PrivateUse1"
AUTOGRAD_KEY = "AutogradPrivateUse1"
# torch_npu's own code for these touches no device kernel: it allocates, looks at metadata or copies bytes.
_HOST_ONLY = frozenset(
    {
        "_copy_from_and_resize",
        "_local_scalar_dense",
        "_pin_memory",
        "_to_copy",
        "empty.memory_format",
        "empty_like",
        "empty_strided",
        "is_pinned",
        "is_set_to",
        "new_empty_strided",
        "pin_memory",
        "record_stream",
        "resize_",
        "resize_as_",
        "set_",
        "set_.source_Storage",
        "set_.source_Storage_storage_offset",
        "set_.source_Tensor",
    }
)
_FORMAT_CASTS = ("npu_format_cast", "npu_format_cast.Tensor", "_npu_format_cast")


def _operator(qualified: str) -> Any | None:
    """The overload behind a registration's name, None for a registration without a schema."""
    namespace, _, name = qualified.partition("::")
    base, _, overload = name.partition(".")
    try:
        return getattr(getattr(getattr(torch.ops, namespace), base), overload or "default")
    except AttributeError:
        return None


def _is_view(op: Any) -> bool:
    return any(r.alias_info is not None and not r.alias_info.is_write for r in op._schema.returns)


def device_operators() -> dict[str, Any]:
    """Every aten operator with a torch_npu kernel that must compute, by name without the namespace."""
    found = {}
    for qualified in torch._C._dispatch_get_registrations_for_dispatch_key(DEVICE_KEY):
        namespace, _, name = qualified.partition("::")
        if namespace != "aten" or name in _HOST_ONLY or name in ("copy_", "scaled_dot_product_attention"):
            continue
        op = _operator(qualified)
        if op is not None and not _is_view(op):
            found[name] = op
    return found


def _copy_kernel(executor: Executor) -> Callable[..., torch.Tensor]:
    """``copy_``: between host and device torch_npu's own code, but for a strided target, which needs a kernel."""
    own = torch.library.get_kernel("aten::copy_", DEVICE_KEY)
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
    op = torch.ops.aten.copy_.default

    def copy_(to: torch.Tensor, source: torch.Tensor, non_blocking: bool = False) -> torch.Tensor:
        if is_npu(to) and is_npu(source):
            executor.run(op, (to, source), {})
        elif is_npu(to) and not to.is_contiguous():
            landed = torch.empty(to.shape, dtype=to.dtype, device=to.device)
            own.call_boxed(keys, landed, source, non_blocking)
            executor.run(op, (to, landed), {})
        else:
            own.call_boxed(keys, to, source, non_blocking)
        return to

    return copy_


def _sdpa_kernel(executor: Executor, log: CallLog) -> Callable[..., torch.Tensor]:
    """``scaled_dot_product_attention`` by the CPU, with a note of whether the real one would take its fused path."""
    op = torch.ops.aten.scaled_dot_product_attention.default

    def attention(*args: Any, **kwargs: Any) -> torch.Tensor:
        named = dict(zip((a.name for a in op._schema.arguments), args, strict=False)) | kwargs
        call = SdpaCall.of("eager", named)  # built now: a closure over the tensors would keep their memory
        result: torch.Tensor = executor.run(op, args, kwargs, observe=lambda phase: log.add(replace(call, phase=phase)))
        return result

    return attention


def _format_cast_kernel(executor: Executor) -> Callable[..., torch.Tensor]:
    """``npu_format_cast``: private memory formats do not exist here, so it is a copy (Module.to casts conv weights)."""
    clone = torch.ops.aten.clone.default

    def format_cast(tensor: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        copied: torch.Tensor = executor.run(clone, (tensor,), {})
        return copied

    return format_cast


def _computing(executor: Executor, op: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: executor.run(op, args, kwargs)


def register(
    executor: Executor, log: CallLog, npu_operators: dict[str, Callable[..., Any]]
) -> list[torch.library.Library]:
    """Overrides the device kernels; the returned libraries must stay alive as long as the kernels are wanted.

    ``npu_operators`` are kernels for torch_npu's own operators, by name without the ``npu::`` namespace.
    """
    aten, npu = torch.library.Library("aten", "IMPL"), torch.library.Library("npu", "IMPL")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of every override
        for name, op in device_operators().items():
            aten.impl(name, _computing(executor, op), DEVICE_KEY)
        aten.impl("copy_", _copy_kernel(executor), DEVICE_KEY)
        for key in (DEVICE_KEY, AUTOGRAD_KEY):
            aten.impl("scaled_dot_product_attention", _sdpa_kernel(executor, log), key)
        for name in _FORMAT_CASTS:
            npu.impl(name, _format_cast_kernel(executor), DEVICE_KEY)
        for name, kernel in npu_operators.items():
            npu.impl(name, kernel, DEVICE_KEY)
    return [aten, npu]
