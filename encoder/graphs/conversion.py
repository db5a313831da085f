"""A tower as OpenVINO's model, in the form that is compiled: traced once, through the same dispatcher as eager, and
kept for the next start."""

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from encoder.attention.dispatch import CallTrace
from encoder.attention.hf import attending
from encoder.graphs.ir_store import IrStore
from encoder.graphs.mlp_slices import SLICE_BYTES, slice_mlps
from encoder.graphs.patch_product import patches_as_product
from encoder.graphs.runner import GraphRunner
from encoder.models.tower import Inputs

PRECISIONS = {torch.float32: "f32", torch.bfloat16: "bf16", torch.float16: "f16"}
# Part of the key of what is kept: raise it when the way of converting changes.
CONVERSION = "2"


@dataclass(frozen=True)
class Converted:
    """OpenVINO's model for any batch and text length, its attention calls when it was traced, and where it is kept."""

    model: Any
    trace: CallTrace
    file: Path | None = None


def tower_as_model(runner: GraphRunner, core: Any, inputs: Inputs, length: int) -> Converted:
    """From the store where it is kept there, else converted and kept; `inputs` as the tower's forward takes them.

    length: that of the inputs' bucket, 0 where items have none: sizes like it are left open. What speaks against
    keeping the model is added to the runner's notes.
    """
    return _kept(runner, core, "whole", lambda: convert(runner, inputs, length))


def sliced(runner: GraphRunner, core: Any, whole: Converted) -> Converted:
    """The same with its MLPs in slices, which is kept too: its weights need not stay in memory then."""

    def cut() -> Converted:
        model = whole.model.clone()
        slice_mlps(model)
        return Converted(model, whole.trace)

    return _kept(runner, core, f"slices of {SLICE_BYTES}", cut)


def _kept(runner: GraphRunner, core: Any, form: str, make: Callable[[], Converted]) -> Converted:
    import openvino

    options = runner.options
    if options.cache is None or not options.identity:
        return make()
    store = IrStore(options.cache / "openvino")
    key = (*options.identity, *_versions(), runner.dispatcher.resolved.name, *_numbers(runner), form)
    kept = store.find(key)
    if kept is None:
        made = make()
        try:
            file = store.keep(
                key, lambda path: openvino.save_model(made.model, path, compress_to_fp16=False), made.trace
            )
        except OSError as error:
            runner.notes.append(f"the converted model is not kept for the next start: {error}")
            return made
        kept = file, made.trace
    file, trace = kept
    return Converted(core.read_model(file), trace, file)


def convert(runner: GraphRunner, inputs: Mapping[str, torch.Tensor], length: int) -> Converted:
    """See `tower_as_model`; it holds float32 weights of its own, or int8 ones."""
    import openvino

    # Tracing runs the tower several times, and two items tell it as much as many.
    few = {name: tensor[:2] for name, tensor in inputs.items()}
    tower = runner.tower
    was = next(tower.module.parameters()).dtype

    class Traced(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = tower.module

        def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
            output = tower.forward(dict(zip(few, tensors, strict=True)))
            return tuple(part for part in output if part is not None)

    try:
        tower.module.float()
        with torch.no_grad(), attending(runner.dispatcher) as trace, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # tracing warns of every Python branch on a shape
            model = openvino.convert_model(Traced().eval(), example_input=tuple(few.values()))
    finally:
        tower.module.to(was)
    model.reshape({
        port: [-1, *(-1 if size == length else size for size in tensor.shape[1:])]
        for port, tensor in zip(model.inputs, inputs.values(), strict=True)
    })  # fmt: skip
    patches_as_product(model)
    if runner.options.int8 is not None:
        from encoder.graphs.int8 import quantised

        model = quantised(model, tower, runner.options.int8)
    return Converted(model, trace)


def _versions() -> tuple[str, ...]:
    import openvino
    import transformers

    return (f"conversion {CONVERSION}", openvino.get_version(), torch.__version__, transformers.__version__)


def _numbers(runner: GraphRunner) -> tuple[str, str]:
    """The weights that are converted have been rounded to the dtype already."""
    int8 = runner.options.int8
    return PRECISIONS[runner.dtype], f"int8 {int8.digest}" if int8 else "as trained"
