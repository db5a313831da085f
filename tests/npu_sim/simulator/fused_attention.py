"""A CPU reference of ``npu_fused_infer_attention_score``: fp32 arithmetic, the documented limits, switchable faults.

It covers attention without and with a mask in the layouts BSH, BSND, BNSD, BNSD_BSND and TND, grouped heads, and
valid lengths. Quantisation, paged caches, rope inputs, ``pse_shift``, prefixes and the log-sum-exp output are refused.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..settings import Misbehaviour
from .calls import FUSED_OPERATOR, CallLog, FusedCall
from .execution import Executor
from .fused_rules import AttentionCall, check_call, refuse

MASKED = torch.finfo(torch.float32).min  # finite, as in the kernel: a fully masked row averages all values
MASK_FAULT_STARTS = 512
COVERED = frozenset(
    {
        "query",
        "key",
        "value",
        "atten_mask",
        "actual_seq_lengths",
        "actual_seq_lengths_kv",
        "num_heads",
        "scale",
        "pre_tokens",
        "next_tokens",
        "input_layout",
        "num_key_value_heads",
        "sparse_mode",
        "inner_precise",
        "workspace",
        "out",
    }
)
CHECKED = COVERED - {"query", "key", "value", "workspace", "out"}


def _allowed(call: AttentionCall, queries: int, keys: int) -> torch.Tensor | None:
    """Which key each query may see by ``sparse_mode`` alone, (queries, keys) bool; None for all.

    Mode 2 is causal from the top left, 3 from the bottom right, 4 a band around the bottom-right diagonal.
    """
    if call.sparse_mode not in (2, 3, 4):
        return None
    offset = 0 if call.sparse_mode == 2 else keys - queries
    ahead = torch.arange(keys) - torch.arange(queries)[:, None] - offset  # how far a key lies after the diagonal
    if call.sparse_mode == 4:
        return (ahead <= call.next_tokens) & (ahead >= -call.pre_tokens)
    return ahead <= 0


def _one_sequence(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    call: AttentionCall,
    fault: Misbehaviour | None,
) -> torch.Tensor:
    """Attention of one sequence, (heads, queries, head_dim), in fp32. ``mask`` is (queries, keys), True = masked."""
    if key.shape[1] == 0:
        return torch.zeros_like(query, dtype=torch.float32)
    group = call.num_heads // call.num_key_value_heads
    keys, values = (x.float().repeat_interleave(group, 0) for x in (key, value))
    scores = query.float() @ keys.transpose(1, 2) * call.scale
    if fault is Misbehaviour.UNIFORM_AVERAGE and call.layout == "TND" and mask is None and call.sparse_mode == 0:
        scores = torch.zeros_like(scores)
    allowed = _allowed(call, query.shape[1], key.shape[1])
    hidden = mask if allowed is None else ~allowed
    if hidden is None:
        return scores.softmax(-1) @ values
    if fault is Misbehaviour.MASK_IGNORED_PAST_512:
        hidden = hidden & (torch.arange(hidden.shape[-1]) < MASK_FAULT_STARTS)
    weights = scores.masked_fill(hidden, MASKED).softmax(-1)
    if call.zero_masked_rows:
        weights = weights.masked_fill(hidden.all(-1, keepdim=True), 0.0)
    return weights @ values


def _by_batch(tensor: torch.Tensor, layout: str, heads: int) -> torch.Tensor:
    """(batch, heads, length, head_dim) view of a tensor in a batched layout."""
    if layout.startswith("BNSD"):
        return tensor
    if layout == "BSH":
        tensor = tensor.view(*tensor.shape[:2], heads, -1)
    return tensor.transpose(1, 2)


def _mask_of(mask: torch.Tensor, entry: int, queries: int, keys: int) -> torch.Tensor:
    """The (queries, keys) mask of one batch entry out of any of the documented shapes."""
    flat = mask.bool()
    if flat.dim() == 2 and flat.shape[0] != queries:  # (B, keys), for one query
        return flat[entry : entry + 1, :keys]
    while flat.dim() > 2:
        flat = flat[min(entry, flat.shape[0] - 1)]
    return flat[:queries, :keys] if flat.shape[0] != 1 else flat[:, :keys]


def _require_compressed_causal(mask: torch.Tensor) -> None:
    flat = mask.reshape(mask.shape[-2:]).bool()
    if not torch.equal(flat, torch.ones_like(flat).triu(1)):
        refuse("the 2048x2048 atten_mask must mask exactly what lies above the diagonal")


def compute(
    call: AttentionCall,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    fault: Misbehaviour | None,
) -> torch.Tensor:
    """The operator's output for CPU tensors, in the query's dtype; rows past a valid length are zero."""
    compressed = call.sparse_mode in (2, 3, 4)
    if compressed:
        assert mask is not None
        _require_compressed_causal(mask)
    out = torch.zeros_like(query)
    if call.layout == "TND":
        start, start_kv = 0, 0
        for length, length_kv in zip(call.lengths, call.lengths_kv, strict=True):
            rows, columns = slice(start, start + length), slice(start_kv, start_kv + length_kv)
            parts = (query[rows].transpose(0, 1), key[columns].transpose(0, 1), value[columns].transpose(0, 1))
            out[rows] = _one_sequence(*parts, None, call, fault).transpose(0, 1).to(out.dtype)
            start, start_kv = rows.stop, columns.stop
    else:
        q, target = (_by_batch(x, call.layout, call.num_heads) for x in (query, out))
        k, v = (_by_batch(x, call.layout, call.num_key_value_heads) for x in (key, value))
        for b, (length, length_kv) in enumerate(zip(call.lengths, call.lengths_kv, strict=True)):
            part = None if mask is None or compressed else _mask_of(mask, b, length, length_kv)
            result = _one_sequence(q[b, :, :length], k[b, :, :length_kv], v[b, :, :length_kv], part, call, fault)
            target[b, :, :length] = result.to(out.dtype)
    if fault is Misbehaviour.NAN_OUTPUT:
        out.fill_(float("nan"))
    return out.transpose(1, 2).contiguous() if call.layout == "BNSD_BSND" else out


class FusedAttention:
    """The kernels of the fused operator, with the fault that is switched on now."""

    def __init__(self, executor: Executor, log: CallLog, device_name: str, fault: Misbehaviour | None) -> None:
        self._executor = executor
        self._log = log
        self._device_name = device_name
        self.fault = fault

    def kernels(self) -> dict[str, Callable[..., Any]]:
        """The kernels by operator name. Output shapes of a capture come from torch_npu's own code."""
        return {
            FUSED_OPERATOR: self._kernel(torch.ops.npu.npu_fused_infer_attention_score.default),
            f"{FUSED_OPERATOR}.out": self._kernel(torch.ops.npu.npu_fused_infer_attention_score.out),
            f"_{FUSED_OPERATOR}_get_max_workspace": self._workspace,
        }

    def _check(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[AttentionCall, dict[str, Any]]:
        schema = op._schema.arguments
        given = dict(zip((a.name for a in schema), args, strict=False)) | kwargs
        named = {a.name: given.get(a.name, a.default_value) for a in schema}
        strange = [a.name for a in schema if a.name not in COVERED and not _is_default(named[a.name], a.default_value)]
        if strange:
            raise NotImplementedError(f"npu simulator: {FUSED_OPERATOR} is not simulated with {', '.join(strange)}")
        options: dict[str, Any] = {name: named[name] for name in CHECKED}
        options |= {"device_name": self._device_name, "old_cann": self.fault is Misbehaviour.OLD_CANN}
        checked = check_call(named["query"], named["key"], named["value"], **options)
        return checked, named

    def _kernel(self, op: Any) -> Callable[..., Any]:
        def kernel(*args: Any, **kwargs: Any) -> Any:
            call, named = self._check(op, args, kwargs)
            note = _note(op.name(), call, named)

            def on_host(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **others: Any) -> Any:
                result = compute(call, query, key, value, others.get("atten_mask"), self.fault)
                if "out" not in others:
                    return result, torch.empty(0, dtype=torch.float32)
                others["out"][0].copy_(result)
                return tuple(others["out"])

            return self._executor.run(
                op, args, kwargs, function=on_host, observe=lambda phase: self._log.add(replace(note, phase=phase))
            )

        return kernel

    def _workspace(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        self._check(torch.ops.npu.npu_fused_infer_attention_score.default, args, kwargs)
        return torch.empty(1, dtype=torch.uint8, device=args[0].device)


def _is_default(value: Any, default: Any) -> bool:
    return value is None if default is None else bool(value == default)


def _note(name: str, call: AttentionCall, named: dict[str, Any]) -> FusedCall:
    def lengths(key: str) -> tuple[int, ...] | None:
        return None if named[key] is None else tuple(int(x) for x in named[key])

    mask = named["atten_mask"]
    return FusedCall(
        phase="eager",
        name=name,
        layout=call.layout,
        query_shape=tuple(named["query"].shape),
        key_shape=tuple(named["key"].shape),
        dtype=named["query"].dtype,
        device=named["query"].device.index,
        num_heads=call.num_heads,
        num_key_value_heads=call.num_key_value_heads,
        scale=call.scale,
        sparse_mode=call.sparse_mode,
        lengths=lengths("actual_seq_lengths"),
        lengths_kv=lengths("actual_seq_lengths_kv"),
        mask_shape=None if mask is None else tuple(mask.shape),
        mask_dtype=None if mask is None else mask.dtype,
    )
