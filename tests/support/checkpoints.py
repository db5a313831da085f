"""Checkpoints of real size with seeded weights, and transformers' own answer to them: the oracle of parity."""

import json
from pathlib import Path

import numpy as np
import torch
from transformers import CLIPConfig, CLIPModel

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
PREPROCESSOR = {
    "image_processor_type": "CLIPImageProcessor", "do_resize": True, "size": {"shortest_edge": 224}, "resample": 3,
    "do_center_crop": True, "crop_size": {"height": 224, "width": 224}, "do_rescale": True,
    "rescale_factor": 0.00392156862745098, "do_normalize": True, "do_convert_rgb": True,
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
}  # fmt: skip


def write_clip(folder: Path, config: dict[str, object], *, seed: int = 0) -> Path:
    """A CLIP checkpoint without tokenizer; queries and keys are scaled up, as flat attention hides attention faults."""
    torch.manual_seed(seed)
    model = CLIPModel(CLIPConfig.from_dict(config)).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if "q_proj.weight" in name or "k_proj.weight" in name:
                weight.mul_(3.0)
    model.save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text(json.dumps(PREPROCESSOR))
    return folder


def oracle(folder: Path) -> CLIPModel:
    """transformers' own model with its own eager attention, float32."""
    model = CLIPModel.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    assert isinstance(model, CLIPModel)
    return model.eval()


def unit(vectors: np.ndarray) -> np.ndarray:
    """Rows of length 1, in float64."""
    wide = vectors.astype(np.float64)
    return wide / np.linalg.norm(wide, axis=1, keepdims=True)


def worst_cosine(found: np.ndarray, expected: np.ndarray) -> float:
    """The least cosine between rows."""
    return float((unit(found) * unit(expected)).sum(axis=1).min())
