"""Loads the weights of one tower with transformers: safetensors only, from disk only, and whole or not at all."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

import torch

from encoder.attention.hf import ATTENTION_NAME, register_bridge
from encoder.errors import CheckpointError
from encoder.models.checkpoint import Checkpoint

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
    wrong = sorted(info["missing_keys"]) + [str(entry[0]) for entry in info.get("mismatched_keys", [])]
    if wrong:
        shown = ", ".join(wrong[:3]) + (f" and {len(wrong) - 3} more" if len(wrong) > 3 else "")
        raise CheckpointError(
            f"{checkpoint.name}: weights are missing or have another shape than config.json says: {shown}"
        )
    loaded: torch.nn.Module = module.eval().requires_grad_(False)
    return loaded


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
    return CheckpointError(f"{checkpoint.name}: the weights in {checkpoint.folder} cannot be loaded: {first_line}")


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
