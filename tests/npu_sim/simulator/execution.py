"""Runs one operator on npu tensors: with CPU kernels over their memory, now, in a capture or in an update."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch_npu
from torch.utils._pytree import tree_leaves, tree_map

from .aliasing import HostArguments, alias, is_npu
from .recording import RecordedCall, Recorder
from .runtime import Runtime, StreamMode

# These take an index on the CPU beside a tensor on the device; every other operator wants one device.
_CPU_INDEX_ALLOWED = frozenset(
    {"aten::index.Tensor", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_", "aten::copy_"}
)
_SEVERAL_DEVICES_ALLOWED = frozenset({"aten::copy_"})
_WAITS_FOR_THE_DEVICE = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
_MASK_DTYPES = (torch.bool, torch.uint8)

Phase = str  # "eager", "capture", "update" or "replay"


def placement(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> int:
    """The index of the device that runs operator ``name``; raises RuntimeError when tensors lie on several."""
    leaves = tree_leaves((args, kwargs))
    tensors = [x for x in leaves if isinstance(x, torch.Tensor)]
    devices = list(dict.fromkeys(x.device for x in tensors if is_npu(x)))
    strangers = [x for x in tensors if not is_npu(x) and x.dim() > 0 and x.device.type != "meta"]
    if len(devices) > 1 and name not in _SEVERAL_DEVICES_ALLOWED:
        raise RuntimeError(
            f"{name}: expected all tensors to be on the same device, found {devices[0]} and {devices[1]}"
        )
    if devices and strangers and name not in _CPU_INDEX_ALLOWED:
        where = strangers[0].device
        raise RuntimeError(f"{name}: expected all tensors to be on the same device, found {devices[0]} and {where}")
    asked = [x for x in leaves if isinstance(x, torch.device) and x.type == "npu"]
    chosen = devices or asked
    if chosen and chosen[0].index is not None:
        return int(chosen[0].index)
    return int(torch_npu.npu.current_device())


def waits_for_the_device(op: Any, args: tuple[Any, ...]) -> bool:
    """Whether the operator's output size depends on data, so that the host must wait for it."""
    tags = getattr(op, "tags", ())
    if not any(tag in tags for tag in _WAITS_FOR_THE_DEVICE):
        return False
    if op.name().startswith("aten::index"):
        return any(isinstance(x, torch.Tensor) and x.dtype in _MASK_DTYPES for x in tree_leaves(args[1]))
    return True


def written_arguments(op: Any, host: HostArguments) -> list[torch.Tensor]:
    """The aliases of the tensors that the operator changes, by its schema (an ``out`` list counts as well)."""
    written: list[Any] = []
    for position, argument in enumerate(op._schema.arguments):
        changes = argument.name == "out" or (argument.alias_info is not None and argument.alias_info.is_write)
        if changes:
            inside = position < len(host.args)
            written += tree_leaves(host.args[position] if inside else host.kwargs.get(argument.name))
    return [x for x in written if isinstance(x, torch.Tensor)]


class Executor:
    """Runs operators on the streams of the simulated devices and hands recorded calls to the recorder."""

    def __init__(self, runtime: Runtime, recorder: Recorder) -> None:
        self._runtime = runtime
        self._recorder = recorder
        self._without_bfloat16 = runtime.device_name().startswith("Ascend310P")

    def stream(self, device: int) -> int:
        """The handle of the device's current stream on this thread."""
        return int(torch_npu.npu.current_stream(device).npu_stream)

    def run(
        self,
        op: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        function: Callable[..., Any] | None = None,
        observe: Callable[[Phase], None] | None = None,
    ) -> Any:
        """Runs ``op`` (by ``function`` where given) and returns its result as npu tensors.

        ``observe`` is told of every execution and its phase; for an updated call it runs before the call is stored.
        """
        function = function or op
        device = placement(op.name(), args, kwargs)
        stream = self.stream(device)
        mode = self._runtime.stream_mode(stream)
        self._refuse_bfloat16(op, args, kwargs)
        if mode is not StreamMode.RUN and waits_for_the_device(op, args):
            self._runtime.synchronise(stream)  # raises, and spoils the capture as it does on a device
        host = HostArguments(args, kwargs)
        on_replay = None if observe is None else lambda: observe("replay")
        if mode is StreamMode.UPDATE:
            self._announce(observe, "update")
            host.release()
            self._runtime.add_kernel(stream, self._recorder.add(RecordedCall(function, host, (), on_replay)))
            return kwargs.get("out")
        capturing = mode is StreamMode.CAPTURE
        graph = self._runtime.captured_graph(stream) if capturing else 0
        with torch.inference_mode():
            if capturing:
                self._recorder.note_before(graph, written_arguments(op, host))
            result = function(*host.args, **host.kwargs)
        self._announce(observe, "capture" if capturing else "eager")
        moved, places = self._to_device(result, host, device)
        if capturing:
            host.release()
            self._recorder.note_fresh(graph, places)
            call = RecordedCall(function, host, places, on_replay)
            self._runtime.add_kernel(stream, self._recorder.add(call))
        return moved

    @staticmethod
    def _announce(observe: Callable[[Phase], None] | None, phase: Phase) -> None:
        if observe is not None:
            observe(phase)

    def _refuse_bfloat16(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if self._without_bfloat16:
            for x in tree_leaves((args, kwargs)):
                if is_npu(x) and x.dtype == torch.bfloat16:
                    raise RuntimeError(f"{op.name()}: bfloat16 is not supported on {self._runtime.device_name()}")

    @staticmethod
    def _to_device(result: Any, host: HostArguments, device: int) -> tuple[Any, tuple[torch.Tensor, ...]]:
        """``result`` with new CPU tensors moved into device memory; also the aliases of that memory."""
        places: list[torch.Tensor] = []

        def move(value: Any) -> Any:
            if not isinstance(value, torch.Tensor):
                return value
            if not host.is_new(value):
                return host.npu_tensor(value)
            value = value.contiguous() if 0 in value.stride() else value  # an expanded result cannot be written into
            there = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device=f"npu:{device}")
            with torch.inference_mode():
                place = alias(there)
                place.copy_(value)
            places.append(place)
            return there

        return tree_map(move, result), tuple(places)
