"""Vision towers of families with a text half: CLIP, MetaCLIP 2, SigLIP, SigLIP2 of fixed size, AIMv2."""

from pathlib import Path
from typing import Any

import torch
from transformers import (
    Aimv2Config,
    Aimv2Model,
    CLIPConfig,
    CLIPModel,
    CLIPVisionModelWithProjection,
    MetaClip2Config,
    MetaClip2Model,
    MetaClip2VisionModelWithProjection,
    SiglipConfig,
    SiglipModel,
)
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


def write_metaclip_2(folder: Path, size: Size) -> Path:
    """ViT-B/32 with QuickGELU, as the worldwide models have it; the text half, of 901629 tokens, is cut short."""
    torch.manual_seed(SEED)
    half = (VIT_B_32["vision_config"] if size == "real" else SMALL_HALF) | {"hidden_act": "quick_gelu"}
    dimensions = 512 if size == "real" else 48
    config = MetaClip2Config.from_dict(
        {
            "projection_dim": dimensions,
            "vision_config": half | {"projection_dim": dimensions},
            "text_config": SMALL_TEXT | {"projection_dim": dimensions, "eos_token_id": 2},
        }
    )
    return save_seeded(MetaClip2Model(config), folder, clip_processor(config.vision_config.image_size), sharpen=3.0)


def write_siglip2(folder: Path, size: Size) -> Path:
    """As google/siglip2-base-patch16-224: SigLIP's architecture, and a processor that resizes bilinearly."""
    torch.manual_seed(SEED)
    vision = SIGLIP_B_16["vision_config"] if size == "real" else SMALL_HALF
    config = SiglipConfig.from_dict({"vision_config": vision, "text_config": SMALL_TEXT | {"projection_size": 64}})
    processor = siglip_processor(config.vision_config.image_size) | {
        "resample": 2,
        "processor_class": "SiglipProcessor",
    }
    return save_seeded(SiglipModel(config), folder, processor, sharpen=1.5)


def write_aimv2(folder: Path, size: Size) -> Path:
    """As apple/aimv2-large-patch14-224-lit, its text half cut short."""
    torch.manual_seed(SEED)
    vision = {} if size == "real" else SMALL_HALF
    text = {key: value for key, value in SMALL_TEXT.items() if key not in ("bos_token_id", "pad_token_id")}
    config = Aimv2Config.from_dict({"projection_dim": 768, "vision_config": vision, "text_config": text})
    return save_seeded(Aimv2Model(config), folder, clip_processor(config.vision_config.image_size), sharpen=3.0)


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


def aimv2_answer(model: Any, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    found = model.vision_model(pixel_values=pixels)
    return model.visual_projection(found.pooler_output), found.last_hidden_state


CLIP = processor_inputs(CLIPImageProcessor, CLIPImageProcessorPil)
SIGLIP = processor_inputs(SiglipImageProcessor, SiglipImageProcessorPil)
LAYERS = layers_of("vision_config", "num_hidden_layers")

CASES = [
    Case("clip-b-32", "clip", write_clip, CLIP, model_oracle(CLIPVisionModelWithProjection, clip_answer), LAYERS),
    Case(
        "metaclip-2-b-32", "metaclip_2", write_metaclip_2, CLIP,
        model_oracle(MetaClip2VisionModelWithProjection, clip_answer), LAYERS,
    ),
    Case("siglip-b-16", "siglip", write_siglip, SIGLIP, model_oracle(SiglipModel, siglip_answer), LAYERS),
    Case("siglip2-b-16-224", "siglip", write_siglip2, SIGLIP, model_oracle(SiglipModel, siglip_answer), LAYERS),
    Case("aimv2-l-14-lit", "aimv2", write_aimv2, CLIP, model_oracle(Aimv2Model, aimv2_answer), LAYERS),
]  # fmt: skip
