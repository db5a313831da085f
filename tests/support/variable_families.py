"""Small seeded checkpoints of the families with pictures of many sizes, and transformers' own answer to each picture.

The oracles take one picture at a time, with transformers' own processor (PIL), model and eager attention.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    MllamaConfig,
    MllamaForConditionalGeneration,
    Qwen2_5_VLConfig,
    Qwen2_5_VLForConditionalGeneration,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
    Qwen3VLConfig,
    Qwen3VLForConditionalGeneration,
    Siglip2Config,
    Siglip2Model,
)
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
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


def save_sharp(model: Any, folder: Path, by: float = 3.0, **saving: Any) -> Path:
    """Saves it with queries and keys scaled up, as flat attention hides attention faults, and biases that matter."""
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith(("q_proj.weight", "k_proj.weight", "in_proj_weight")):
                weight.mul_(by)
            if name.endswith("qkv.weight"):
                weight[: weight.shape[0] // 3 * 2].mul_(by)
            if name.endswith("bias"):
                weight.add_(torch.randn_like(weight) * 0.1)
    model.eval().save_pretrained(folder, **saving)
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


def write_naflex(
    folder: Path, vision: Mapping[str, Any] = NAFLEX["vision_config"], *, patches: int = 64, by: float = 2.0
) -> Path:
    """Pictures of up to so many patches; by default of 8 x 8, with positions learned on 6 x 6."""
    torch.manual_seed(0)
    model = Siglip2Model(Siglip2Config.from_dict({**NAFLEX, "vision_config": dict(vision)}))
    save_sharp(model, folder, by=by)
    _processor(
        folder,
        {
            "image_processor_type": "Siglip2ImageProcessorFast", "do_resize": True, "resample": 2, "do_rescale": True,
            "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.5, 0.5, 0.5],
            "image_std": [0.5, 0.5, 0.5], "patch_size": vision["patch_size"], "max_num_patches": patches,
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


QWEN_TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 64, "head_dim": 16, "bos_token_id": 0, "eos_token_id": 1,
    "rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3], "rope_theta": 10000.0},
}  # fmt: skip
# Config, model, the vision tower's settings; Qwen2.5's windows are 2 x 2 features, and its layer 1 sees whole pictures.
QWEN: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "qwen2_vl": (
        Qwen2VLConfig,
        Qwen2VLForConditionalGeneration,
        {"depth": 3, "embed_dim": 64, "hidden_size": 40, "num_heads": 2, "mlp_ratio": 2, "patch_size": 14},
    ),
    "qwen2_5_vl": (
        Qwen2_5_VLConfig,
        Qwen2_5_VLForConditionalGeneration,
        {
            "depth": 3, "hidden_size": 64, "out_hidden_size": 40, "intermediate_size": 96, "num_heads": 2,
            "patch_size": 14, "window_size": 56, "fullatt_block_indexes": [1],
        },
    ),
    "qwen3_vl": (
        Qwen3VLConfig,
        Qwen3VLForConditionalGeneration,
        {
            "depth": 3, "hidden_size": 64, "out_hidden_size": 40, "intermediate_size": 96, "num_heads": 2,
            "patch_size": 16, "num_position_embeddings": 36, "deepstack_visual_indexes": [0, 1],
        },
    ),
}  # fmt: skip


def write_qwen(
    family: str,
    folder: Path,
    vision: Mapping[str, Any] | None = None,
    *,
    patches: int = 128,
    widen: float = 5,
    max_shard_size: str = "50KB",
) -> Path:
    """A whole model in several files, of which the vision tower is a part; pictures of up to so many patches.

    `widen`: weights are drawn for wide layers, and in narrow ones attention would hardly change the vectors.
    """
    config_class, model_class, small = QWEN[family]
    vision = small if vision is None else vision
    torch.manual_seed(0)
    model = model_class(config_class(vision_config=dict(vision), text_config=QWEN_TEXT))
    for name, weight in model.named_parameters():
        if ".visual.blocks." in name and name.endswith("weight") and weight.dim() == 2:
            weight.data.mul_(widen)
    save_sharp(model, folder, by=1.7, max_shard_size=max_shard_size)
    area = vision["patch_size"] ** 2
    _processor(
        folder,
        {
            "image_processor_type": "Qwen2VLImageProcessorFast", "do_resize": True, "resample": 3, "do_rescale": True,
            "rescale_factor": 1 / 255, "do_normalize": True, "image_mean": [0.48, 0.46, 0.41],
            "image_std": [0.27, 0.26, 0.28], "patch_size": vision["patch_size"], "temporal_patch_size": 2,
            "merge_size": 2, "min_pixels": 4 * area, "max_pixels": patches * area,
        },
    )  # fmt: skip
    return folder


def qwen_oracle(name: str, folder: Path) -> Callable[[np.ndarray], Answer]:
    """The whole model's vision tower; the vector is the mean of its features."""
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    processor = Qwen2VLImageProcessorPil(**{k: v for k, v in settings.items() if k != "image_processor_type"})
    model = QWEN[name][1].from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()

    def answer(pixels: np.ndarray) -> Answer:
        inputs = processor([Image.fromarray(pixels)], return_tensors="pt")
        with torch.inference_mode():
            found = model.model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
        features = found.pooler_output.numpy()
        return features.mean(axis=0), features

    return answer


MLLAMA_VISION: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 3, "num_global_layers": 2, "attention_heads": 2,
    "image_size": 28, "patch_size": 7, "intermediate_layers_indices": [2, 0], "vision_output_dim": 192,
}  # fmt: skip
MLLAMA_TEXT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2,
    "num_key_value_heads": 2, "vocab_size": 64, "cross_attention_layers": [1], "bos_token_id": 0, "eos_token_id": 1,
    "pad_token_id": 2,
}  # fmt: skip


def write_mllama(folder: Path, vision: Mapping[str, Any] = MLLAMA_VISION, *, widen: float = 5) -> Path:
    """A whole model; its gates open, its embeddings of tiles not zero. By default tiles of 28 pixels and 16 patches.

    `widen`: as for `write_qwen`.
    """
    torch.manual_seed(0)
    config = MllamaConfig(vision_config=dict(vision), text_config=MLLAMA_TEXT)
    model = MllamaForConditionalGeneration(config)
    for name, weight in model.named_parameters():
        if "vision_model" in name and name.endswith("gate"):
            weight.data.fill_(0.6)
        elif "vision_model" in name and "_proj.weight" in name:
            weight.data.mul_(widen)
        elif "positional_embedding" in name and name.endswith("embedding.weight"):
            weight.data.normal_(0, 0.3)
    save_sharp(model, folder, by=1.7)
    side = vision["image_size"]
    _processor(
        folder,
        {
            "image_processor_type": "MllamaImageProcessor", "do_resize": True, "resample": 2, "do_rescale": True,
            "rescale_factor": 1 / 255, "do_normalize": True, "do_pad": True, "image_mean": [0.48, 0.46, 0.41],
            "image_std": [0.27, 0.26, 0.28], "size": {"height": side, "width": side}, "max_image_tiles": 4,
            "do_convert_rgb": True,
        },
    )  # fmt: skip
    return folder


def mllama_oracle(folder: Path) -> Callable[[np.ndarray], Answer]:
    """The whole model's vision tower; the vector is the mean of the real tiles' patches."""
    settings = json.loads((folder / "preprocessor_config.json").read_text())
    processor = MllamaImageProcessorPil(**{k: v for k, v in settings.items() if k != "image_processor_type"})
    model = MllamaForConditionalGeneration.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)

    def answer(pixels: np.ndarray) -> Answer:
        inputs = processor([[Image.fromarray(pixels)]], return_tensors="pt")
        (tiles,) = inputs.pop("num_tiles")[0]
        with torch.inference_mode():
            found = model.model.vision_model.eval()(**inputs).last_hidden_state
        features = found[0, 0, :tiles, 1:].flatten(0, 1).numpy()
        return features.mean(axis=0), features

    return answer


def _qwen(name: str) -> Family:
    return Family(partial(write_qwen, name), partial(qwen_oracle, name), head_dim=32)


FAMILIES: dict[str, Family] = {
    "siglip2": Family(write_naflex, naflex_oracle, head_dim=24),
    **{name: _qwen(name) for name in QWEN},
}
