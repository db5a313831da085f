"""Families with a vision and a text half: CLIP, SigLIP; their vision towers."""

from pathlib import Path
from typing import Any

import torch
from transformers import CLIPConfig, CLIPModel, CLIPVisionModelWithProjection, SiglipConfig, SiglipModel
from transformers.models.clip.image_processing_clip import CLIPImageProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from transformers.models.siglip.image_processing_siglip import SiglipImageProcessor

from tests.parity.cases import Case, Size
from tests.parity.oracles import SEED, layers_of, model_oracle, processor_inputs, save_seeded
from tests.support.checkpoints import PREPROCESSOR, SIGLIP_B_16, VIT_B_32

SMALL_HALF = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 56,
    "patch_size": 14,
}  # fmt: skip
SMALL_TEXT = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 99,
    "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 1,
}  # fmt: skip


def clip_processor(side: int) -> dict[str, Any]:
    """CLIP's preprocessor_config.json for pictures of `side` pixels."""
    return PREPROCESSOR | {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}


def siglip_processor(side: int) -> dict[str, Any]:
    """SigLIP's preprocessor_config.json for pictures of `side` pixels."""
    return {
        "image_processor_type": "SiglipImageProcessor", "do_resize": True, "size": {"height": side, "width": side},
        "resample": 3, "do_rescale": True, "rescale_factor": 0.00392156862745098, "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5],
    }  # fmt: skip


def write_clip(folder: Path, size: Size) -> Path:
    torch.manual_seed(SEED)
    small = {"projection_dim": 48, "vision_config": SMALL_HALF | {"projection_dim": 48}, "text_config": SMALL_TEXT}
    config = CLIPConfig.from_dict(VIT_B_32 if size == "real" else small)
    side = config.vision_config.image_size
    return save_seeded(CLIPModel(config), folder, clip_processor(side), sharpen=3.0)


def write_siglip(folder: Path, size: Size) -> Path:
    torch.manual_seed(SEED)
    small = {"vision_config": SMALL_HALF, "text_config": SMALL_TEXT | {"projection_size": 64}}
    config = SiglipConfig.from_dict(SIGLIP_B_16 if size == "real" else small)
    side = config.vision_config.image_size
    return save_seeded(SiglipModel(config), folder, siglip_processor(side), sharpen=1.5)


def clip_answer(model: Any, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = model(pixel_values=pixels)
    return found.image_embeds, found.last_hidden_state[:, 1:]


def siglip_answer(model: Any, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = model.vision_model(pixel_values=pixels)
    return found.pooler_output, found.last_hidden_state


CASES = [
    Case(
        name="clip-vit-b-32",
        family="clip",
        write=write_clip,
        inputs=processor_inputs(CLIPImageProcessor, CLIPImageProcessorPil),
        oracle=model_oracle(CLIPVisionModelWithProjection, clip_answer),
        layers=layers_of("vision_config", "num_hidden_layers"),
    ),
    Case(
        name="siglip-b-16",
        family="siglip",
        write=write_siglip,
        inputs=processor_inputs(SiglipImageProcessor, SiglipImageProcessorPil),
        oracle=model_oracle(SiglipModel, siglip_answer),
        layers=layers_of("vision_config", "num_hidden_layers"),
    ),
]
