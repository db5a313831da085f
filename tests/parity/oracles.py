"""What most cases share: saving a seeded model, running transformers' image processors, and its models."""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from tests.parity.cases import Expected, Inputs, Mode
from tests.preprocess.torchvision_stand_in import torchvision_stand_in

SEED = 7
ORACLE_BATCH = 8


def save_seeded(model: torch.nn.Module, folder: Path, processor: Mapping[str, Any], *, sharpen: float = 1.0) -> Path:
    """Saves the model and its preprocessor_config.json.

    `sharpen` scales queries and keys: flat attention, as fresh weights give it, hides faults of attention. Zero scales
    (layer scale, gates) and biases are drawn anew, as they would hide what they are multiplied with.
    """
    draw = torch.Generator().manual_seed(SEED)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if any(part in name for part in ("q_proj.weight", "k_proj.weight", "query.weight", "key.weight")):
                weight.mul_(sharpen)
            elif name.endswith("bias") or not weight.any():
                weight.copy_(torch.randn(weight.shape, generator=draw) * 0.05)
    model.eval().save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def processor_inputs(
    torch_class: Any, pil_class: Any = None
) -> Callable[[Path, Mode, Sequence[Image.Image]], list[Inputs]]:
    """`Case.inputs` of a family whose processor gives each picture one `pixel_values` [3, H, W]."""

    def inputs(folder: Path, mode: Mode, pictures: Sequence[Image.Image]) -> list[Inputs]:
        config = json.loads((folder / "preprocessor_config.json").read_text())
        config = {key: value for key, value in config.items() if not key.endswith("_type")}
        if mode == "pil":
            made = [np.asarray(pil_class(**config)(picture).pixel_values[0]) for picture in pictures]
            return [{"pixel_values": torch.from_numpy(pixels)[None]} for pixels in made]
        with torchvision_stand_in():
            processor = torch_class(**config)
            return [{"pixel_values": processor(picture, return_tensors="pt").pixel_values} for picture in pictures]

    return inputs


def model_oracle(
    model_class: Any, answer: Callable[[Any, torch.Tensor], tuple[torch.Tensor, torch.Tensor | None]]
) -> Callable[[Path, Sequence[Inputs]], Expected]:
    """`Case.oracle` of a family: `answer(model, pixel_values)` gives vectors [n, D] and features [n, t, F]."""

    def oracle(folder: Path, inputs: Sequence[Inputs]) -> Expected:
        model = model_class.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
        vectors: list[np.ndarray] = []
        features: list[np.ndarray] = []
        for start in range(0, len(inputs), ORACLE_BATCH):
            batch = torch.cat([one["pixel_values"] for one in inputs[start : start + ORACLE_BATCH]])
            with torch.inference_mode():
                pooled, tokens = answer(model, batch)
            vectors.append(pooled.numpy())
            features.extend([] if tokens is None else list(tokens.numpy()))
        return Expected(np.concatenate(vectors), features)

    return oracle


def layers_of(*keys: str) -> Callable[[Path], int]:
    """`Case.layers` read from config.json, e.g. layers_of("vision_config", "num_hidden_layers")."""

    def layers(folder: Path) -> int:
        found: Any = json.loads((folder / "config.json").read_text())
        for key in keys:
            found = found[key]
        return int(found)

    return layers
