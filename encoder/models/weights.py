"""Loads the weights of one tower with transformers: safetensors only, from disk only, and whole or not at all."""

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from types import MappingProxyType
from typing import Any

import torch

from encoder.attention.hf import ATTENTION_NAME, register_bridge
from encoder.errors import CheckpointError
from encoder.models.checkpoint import Checkpoint
from encoder.models.headers import TensorHeader, WeightHeaders, missing_tensors

NO_ARGUMENTS: Mapping[str, Any] = MappingProxyType({})


def load_weights(
    checkpoint: Checkpoint,
    model_class: Any,
    *,
    config: Any = None,
    key_mapping: Mapping[str, str] | None = None,
    arguments: Mapping[str, Any] = NO_ARGUMENTS,
) -> torch.nn.Module:
    """The module in float32 on the CPU, in eval mode; raises CheckpointError when a weight is missing or misshapen.

    Weights that the module has no place for are not read. `config`: of the part that `model_class` is, where the
    checkpoint's is of a whole model. `key_mapping`: regular expressions for names there, and what stands for them here.
    `arguments`: of the model's constructor.
    """
    register_bridge()
    if checkpoint.headers is not None:
        return _without_values(checkpoint, checkpoint.headers, model_class, config, key_mapping, arguments)
    given = dict(arguments) if config is None else {"config": config, **arguments}
    try:
        with _quiet_transformers():
            module, info = model_class.from_pretrained(
                checkpoint.folder,
                key_mapping=dict(key_mapping or {}) or None,
                attn_implementation=ATTENTION_NAME,
                dtype=torch.float32,
                use_safetensors=True,
                local_files_only=True,
                output_loading_info=True,
                **given,
            )
    except Exception as error:  # safetensors, transformers and torch each raise their own
        raise _unreadable(checkpoint, error) from None
    _refuse(checkpoint, sorted(info["missing_keys"]) + [str(entry[0]) for entry in info.get("mismatched_keys", [])])
    loaded: torch.nn.Module = module.eval().requires_grad_(False)
    return loaded


def _without_values(
    checkpoint: Checkpoint,
    headers: WeightHeaders,
    model_class: Any,
    config: Any,
    key_mapping: Mapping[str, str] | None,
    arguments: Mapping[str, Any],
) -> torch.nn.Module:
    """The module on the meta device, once the headers say that its weights are there."""
    try:
        with _quiet_transformers(), torch.device("meta"):
            found = config or model_class.config_class.from_pretrained(checkpoint.folder)
            module: torch.nn.Module = model_class(found, **arguments)
    except Exception as error:
        raise _unreadable(checkpoint, error) from None
    named = _as_the_module_names_them(module, headers, key_mapping)
    _refuse(checkpoint, missing_tensors(replace(headers, tensors=named), module.state_dict()))
    return module.eval()


def _as_the_module_names_them(
    module: Any, headers: WeightHeaders, key_mapping: Mapping[str, str] | None
) -> dict[str, TensorHeader]:
    """The tensors under the names that transformers loads them by: checkpoints keep those of the past.

    Of a tensor that is split or merged on its way the parts are taken for right when the whole is there.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

    expected = module.state_dict()
    rules = get_model_conversion_mapping(module, dict(key_mapping or {}) or None)
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    named: dict[str, TensorHeader] = {}
    for name, tensor in headers.tensors.items():
        found, pattern = rename_source_key(name, renamings, converters, module.base_model_prefix, expected)
        if pattern is None:
            named[found] = tensor
            continue
        targets = next(rule.target_patterns for rule in converters if pattern in rule.source_patterns)
        for part in (found.replace(targets[0], target) for target in targets):
            if part in expected:
                named[part] = replace(tensor, shape=tuple(expected[part].shape))
    return named


def _refuse(checkpoint: Checkpoint, wrong: Sequence[str]) -> None:
    if wrong:
        shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise CheckpointError(
            f"{checkpoint.name}: weights are missing or have another shape than config.json says: {shown}"
        )


def read_scalar(checkpoint: Checkpoint, name: str) -> float | None:
    """One number among the weights, e.g. 'logit_scale', without loading the rest; None when there is none."""
    from safetensors import SafetensorError, safe_open

    for path in sorted(checkpoint.folder.glob("*.safetensors")):
        try:
            with safe_open(path, framework="pt") as tensors:
                if name in tensors.keys():  # noqa: SIM118 - safe_open has no __contains__
                    return float(tensors.get_tensor(name))
        except SafetensorError as error:
            raise _unreadable(checkpoint, error) from None
    return None


def learned_scale(checkpoint: Checkpoint) -> float:
    """What CLIP and SigLIP multiply cosines by; they learn its logarithm. 0 when the checkpoint has none."""
    logarithm = read_scalar(checkpoint, "logit_scale")
    return 0.0 if logarithm is None else math.exp(logarithm)


def _unreadable(checkpoint: Checkpoint, error: Exception) -> CheckpointError:
    first_line = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    return CheckpointError(
        f"{checkpoint.name}: the weights in {checkpoint.folder} cannot be loaded: {first_line}: "
        f"`vitfleet add-check {checkpoint.folder}` says which file is at fault"
    )


@contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Without its progress bars and its warnings of the other tower's weights: what matters is checked here."""
    from transformers.utils import logging

    verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()
