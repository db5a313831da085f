"""Checkpoints of real size with seeded weights, and transformers' own answer to them: the oracle of parity."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import CLIPConfig, CLIPModel, SiglipConfig, SiglipModel

VIT_B_32: dict[str, object] = {
    "projection_dim": 512,
    "vision_config": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "image_size": 224, "patch_size": 32, "projection_dim": 512,
    },
    "text_config": {
        "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 12, "num_attention_heads": 8,
        "vocab_size": 49408, "max_position_embeddings": 77, "projection_dim": 512,
        "bos_token_id": 49406, "eos_token_id": 49407, "pad_token_id": 49407,
    },
}  # fmt: skip
# For the vision tower: of the text tower, which is not looked at, one layer is enough.
VIT_L_14: dict[str, object] = {
    "projection_dim": 768,
    "vision_config": {
        "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
        "image_size": 224, "patch_size": 14, "projection_dim": 768,
    },
    "text_config": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 1, "num_attention_heads": 12,
        "vocab_size": 49408, "max_position_embeddings": 77, "projection_dim": 768,
        "bos_token_id": 49406, "eos_token_id": 49407, "pad_token_id": 49407,
    },
}  # fmt: skip
SIGLIP_B_16: dict[str, object] = {
    "vision_config": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
        "image_size": 224, "patch_size": 16,
    },
    "text_config": {
        "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 1, "num_attention_heads": 12,
        "vocab_size": 32000, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
    },
}  # fmt: skip
SIGLIP_SO400M_14_384: dict[str, object] = {
    "vision_config": {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
        "image_size": 384, "patch_size": 14,
    },
    "text_config": {
        "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 1, "num_attention_heads": 16,
        "vocab_size": 32000, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
    },
}  # fmt: skip
PREPROCESSOR = {
    "image_processor_type": "CLIPImageProcessor", "do_resize": True, "size": {"shortest_edge": 224}, "resample": 3,
    "do_center_crop": True, "crop_size": {"height": 224, "width": 224}, "do_rescale": True,
    "rescale_factor": 0.00392156862745098, "do_normalize": True, "do_convert_rgb": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip


def write_clip(folder: Path, config: dict[str, object], *, seed: int = 0) -> Path:
    """A CLIP checkpoint without tokenizer."""
    torch.manual_seed(seed)
    _save_sharp(CLIPModel(CLIPConfig.from_dict(config)), folder, 3.0)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return folder


def write_siglip(folder: Path, config: dict[str, Any], *, seed: int = 0) -> Path:
    """A SigLIP checkpoint without tokenizer."""
    torch.manual_seed(seed)
    _save_sharp(SiglipModel(SiglipConfig.from_dict(config)), folder, 1.5)
    side = config["vision_config"]["image_size"]
    processor = {
        "image_processor_type": "SiglipImageProcessor", "do_resize": True, "size": {"height": side, "width": side},
        "resample": 3, "do_rescale": True, "rescale_factor": 0.00392156862745098, "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }  # fmt: skip
    (folder / "preprocessor_config.json").write_text(json.dumps(processor))
    return folder


def _save_sharp(model: torch.nn.Module, folder: Path, factor: float) -> None:
    """With queries and keys scaled up, as flat attention hides attention faults.

    The factor is the family's: SigLIP starts with larger weights, and too sharp a softmax is chaos in bfloat16.
    """
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name:
                weight.mul_(factor)
    model.eval().save_pretrained(folder)


def oracle(folder: Path) -> CLIPModel:
    """transformers' own model with its own eager attention, float32."""
    model = CLIPModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    assert isinstance(model, CLIPModel)
    return model.eval()


def vision_oracle(folder: Path, pixels: torch.Tensor) -> np.ndarray:
    """transformers' own float32 vectors of normalised pixels, of a CLIP or a SigLIP checkpoint."""
    if json.loads((folder / "config.json").read_text())["model_type"] == "clip":
        clip = oracle(folder)
        with torch.inference_mode():
            vectors: np.ndarray = clip.visual_projection(clip.vision_model(pixel_values=pixels).pooler_output).numpy()
        return vectors
    model = SiglipModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval()
    with torch.inference_mode():
        pooled: np.ndarray = model.vision_model(pixel_values=pixels).pooler_output.numpy()
    return pooled


def unit(vectors: np.ndarray) -> np.ndarray:
    """Rows of length 1, in float64."""
    wide = vectors.astype(np.float64)
    return wide / np.linalg.norm(wide, axis=1, keepdims=True)


def worst_cosine(found: np.ndarray, expected: np.ndarray) -> float:
    """The least cosine between rows."""
    return float((unit(found) * unit(expected)).sum(axis=1).min())
