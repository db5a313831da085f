"""Small seeded checkpoints of the families with pictures of many sizes, and transformers' own answer to each picture.

The oracles take one picture at a time, with transformers' own processor (PIL), model and eager attention.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import Siglip2Config, Siglip2Model
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil

Answer = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True)
class Family:
    """`write` makes a checkpoint folder; `load` gives its oracle: RGB pixels to a vector [D] and features [t, F]."""

    write: Callable[[Path], Path]
    load: Callable[[Path], Callable[[np.ndarray], Answer]]
    head_dim: int


def picture(height: int, width: int, seed: int = 0) -> np.ndarray:
    """Smooth colours with an edge, uint8 [h, w, 3]."""
    rng = np.random.default_rng([seed, height, width])
    coarse = Image.fromarray(rng.integers(0, 256, (5, 6, 3), dtype=np.uint8))
    pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)).copy()
    pixels[: height // 3, : width // 2] = rng.integers(0, 256, 3)
    return pixels


def save_sharp(model: Any, folder: Path, by: float = 3.0) -> Path:
    """Saves it with queries and keys scaled up, as flat attention hides attention faults, and biases that matter."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "in_proj_weight")):
                weight.mul_(by)
            if name.endswith("qkv.weight"):
                weight[: weight.shape[0] // 3 * 2].mul_(by)
            if name.endswith("bias"):
                weight.add_(torch.randn_like(weight) * 0.1)
    model.eval().save_pretrained(folder)
    return folder


def _processor(folder: Path, settings: dict[str, Any]) -> None:
    (folder / "preprocessor_config.json").write_text(json.dumps(settings))


NAFLEX: dict[str, Any] = {
    "vision_config": {
        "hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 3, "num_attention_heads": 2,
        "patch_size": 8, "num_patches": 36,
    },
    "text_config": {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 600,
        "max_position_embeddings": 64, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0, "projection_size": 48,
    },
}  # fmt: skip


def write_naflex(folder: Path) -> Path:
    """Up to 64 patches of 8 x 8, positions learned on 6 x 6."""
    torch.manual_seed(0)
    save_sharp(Siglip2Model(Siglip2Config.from_dict(NAFLEX)), folder)
    _processor(
        folder,
        {
            "image_processor_type": "Siglip2ImageProcessorFast", "do_resize": True, "resample": 2, "do_rescale": True,
            "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5], "patch_size": 8, "max_num_patches": 64,
        },
    )  # fmt: skip
    return folder


def naflex_batch(folder: Path, pictures: list[np.ndarray]) -> list[Answer]:
    """transformers' answers to pictures in one padded batch."""
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    processor = Siglip2ImageProcessorPil(**{k: v for k, v in settings.items() if k != "image_processor_type"})
    model = Siglip2Model.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    inputs = processor([Image.fromarray(pixels) for pixels in pictures], return_tensors="pt")
    with torch.inference_mode():
        found = model.vision_model(**inputs)
    real = inputs["pixel_attention_mask"].bool()
    return [
        (vector.numpy(), features[mask].numpy())
        for vector, features, mask in zip(found.pooler_output, found.last_hidden_state, real, strict=True)
    ]


def naflex_oracle(folder: Path) -> Callable[[np.ndarray], Answer]:
    """One picture after the other, each padded to the full length and masked."""
    return lambda pixels: naflex_batch(folder, [pixels])[0]


FAMILIES: dict[str, Family] = {
    "siglip2": Family(write_naflex, naflex_oracle, head_dim=24),
}
