"""CPU tensors over the bytes of simulated device memory."""

from __future__ import annotations

import ctypes
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

POISON = 0xFF  # NaN in every float format, -1 in every signed integer


def is_npu(value: object) -> bool:
    return isinstance(value, torch.Tensor) and value.device.type == "npu"


def alias(tensor: torch.Tensor) -> torch.Tensor:
    """A CPU tensor that shares the memory of an npu tensor: same dtype, shape, strides and offset.

    It does not keep the memory allocated. That is what a captured graph is like: it knows addresses alone.
    """
    storage = tensor.untyped_storage()
    if storage.nbytes() == 0:
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="cpu")
    raw = (ctypes.c_char * storage.nbytes()).from_address(storage.data_ptr())
    bytes_of = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
    empty = torch.empty(0, dtype=tensor.dtype, device="cpu")
    return empty.set_(bytes_of, tensor.storage_offset(), tensor.size(), tensor.stride())


def poison(tensor: torch.Tensor) -> None:
    """Fills a CPU alias with what unwritten device memory holds (True for booleans, which must stay 0 or 1)."""
    if tensor.dtype == torch.bool:
        tensor.fill_(True)
    elif tensor.numel():
        dense = torch.empty_like(tensor, memory_format=torch.contiguous_format)
        dense.view(torch.uint8).fill_(POISON) if dense.dim() else dense.view(1).view(torch.uint8).fill_(POISON)
        tensor.copy_(dense)


class HostArguments:
    """One operator call with every npu tensor replaced by its CPU alias and every npu device by the CPU."""

    def __init__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._origins: dict[int, torch.Tensor] = {}  # id of the alias -> the npu tensor
        self._by_origin: dict[int, torch.Tensor] = {}  # id of the npu tensor -> its alias
        self.args, self.kwargs = tree_map(self._convert, (args, kwargs))
        self._own = frozenset(self._origins)

    def _convert(self, value: Any) -> Any:
        if is_npu(value):
            if id(value) not in self._by_origin:
                self._by_origin[id(value)] = alias(value)
                self._origins[id(self._by_origin[id(value)])] = value
            return self._by_origin[id(value)]
        if isinstance(value, torch.device) and value.type == "npu":
            return torch.device("cpu")
        if isinstance(value, torch.Generator):
            return None  # the CPU's default generator draws; an npu generator cannot
        return value

    def npu_tensor(self, alias_of: torch.Tensor) -> torch.Tensor:
        """The npu tensor behind an alias, which an in-place or ``out=`` operator returned."""
        return self._origins[id(alias_of)]

    def is_new(self, value: object) -> bool:
        """Whether ``value``, a part of the call's result, is a tensor that no argument owns."""
        return isinstance(value, torch.Tensor) and id(value) not in self._own

    def new_tensors(self, result: Any) -> list[torch.Tensor]:
        """The tensors of ``result`` that no argument owns, in order."""
        return [leaf for leaf in tree_leaves(result) if self.is_new(leaf)]

    def release(self) -> None:
        """Lets go of the npu tensors: a recorded call knows addresses and keeps no memory allocated."""
        self._origins.clear()
        self._by_origin.clear()
