"""Families for pictures alone: DINOv2 with and without registers, DINOv3, ViT, AIMv2's vision models."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import (
    Aimv2VisionConfig,
    Aimv2VisionModel,
    Dinov2Config,
    Dinov2Model,
    Dinov2WithRegistersConfig,
    Dinov2WithRegistersModel,
    DINOv3ViTConfig,
    DINOv3ViTModel,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)
from transformers.models.bit.image_processing_bit import BitImageProcessor
from transformers.models.bit.image_processing_pil_bit import BitImageProcessorPil
from transformers.models.clip.image_processing_clip import CLIPImageProcessor
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil
from transformers.models.vit.image_processing_pil_vit import ViTImageProcessorPil
from transformers.models.vit.image_processing_vit import ViTImageProcessor

from tests.parity.cases import Case, Size
from tests.parity.dual import clip_processor
from tests.parity.oracles import SEED, layers_of, model_oracle, processor_inputs, save_seeded
from tests.preprocess.torchvision_stand_in import torchvision_stand_in

with torchvision_stand_in():
    from transformers.models.dinov3_vit.image_processing_dinov3_vit import DINOv3ViTImageProcessor

Answer = Callable[[Any, torch.Tensor], tuple[torch.Tensor, torch.Tensor]]
IMAGENET = {"image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225]}
SMALL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
REGISTERS = 4
# bfloat16 cannot follow a softmax that is sharp through twelve layers, whoever computes it.
SHARPEN: dict[Size, float] = {"real": 2.0, "small": 4.0}


def dinov2_processor(size: Size) -> dict[str, Any]:
    """As facebook/dinov2-base has it: shorter side to 256, middle 224."""
    edge, crop = (256, 224) if size == "real" else (66, 56)
    return {
        "image_processor_type": "BitImageProcessor", "do_resize": True, "size": {"shortest_edge": edge}, "resample": 3,
        "do_center_crop": True, "crop_size": {"height": crop, "width": crop}, "do_convert_rgb": True,
        "do_rescale": True, "rescale_factor": 0.00392156862745098, "do_normalize": True, **IMAGENET,
    }  # fmt: skip


def dinov3_processor(size: Size) -> dict[str, Any]:
    """As facebook/dinov3-vits16-pretrain-lvd1689m has it; the small one is not square."""
    height, width = (224, 224) if size == "real" else (48, 64)
    return {
        "image_processor_type": "DINOv3ViTImageProcessorFast", "crop_size": None, "do_center_crop": None,
        "default_to_square": True, "do_resize": True, "size": {"height": height, "width": width}, "resample": 2,
        "do_rescale": True, "rescale_factor": 0.00392156862745098, "do_normalize": True, **IMAGENET,
    }  # fmt: skip


def vit_processor(size: Size) -> dict[str, Any]:
    """As google/vit-base-patch16-224 has it."""
    return {
        "image_processor_type": "ViTImageProcessor", "do_resize": True, "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5], "resample": 2,
        "size": 224 if size == "real" else 64,
    }  # fmt: skip


def write_dinov2(folder: Path, size: Size) -> Path:
    """Positions for 518 pixels, pictures of 224."""
    torch.manual_seed(SEED)
    config = Dinov2Config(image_size=518) if size == "real" else Dinov2Config(**SMALL, image_size=126)
    return save_seeded(Dinov2Model(config), folder, dinov2_processor(size), sharpen=SHARPEN[size])


def write_dinov2_registers(folder: Path, size: Size) -> Path:
    torch.manual_seed(SEED)
    common = {"num_register_tokens": REGISTERS, "use_swiglu_ffn": True}
    config = (
        Dinov2WithRegistersConfig(image_size=518, **common)
        if size == "real"
        else Dinov2WithRegistersConfig(**SMALL, image_size=126, **common)
    )
    return save_seeded(Dinov2WithRegistersModel(config), folder, dinov2_processor(size), sharpen=SHARPEN[size])


def write_dinov3(folder: Path, size: Size) -> Path:
    """ViT-B/16 with the gated MLP of the larger ones."""
    torch.manual_seed(SEED)
    real = {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072}
    small = SMALL | {"intermediate_size": 128}
    config = DINOv3ViTConfig(num_register_tokens=REGISTERS, use_gated_mlp=True, **(real if size == "real" else small))
    return save_seeded(DINOv3ViTModel(config), folder, dinov3_processor(size), sharpen=SHARPEN[size])


def write_vit(folder: Path, size: Size) -> Path:
    """As released: a classifier, and no pooler."""
    torch.manual_seed(SEED)
    config = ViTConfig() if size == "real" else ViTConfig(**SMALL, intermediate_size=128, image_size=64)
    return save_seeded(ViTForImageClassification(config), folder, vit_processor(size), sharpen=SHARPEN[size])


def aimv2_writer(*, native: bool) -> Callable[[Path, Size], Path]:
    """aimv2-large-patch14-224, or the one for any resolution, which is given a processor of one size here."""

    def write(folder: Path, size: Size) -> Path:
        torch.manual_seed(SEED)
        small = SMALL | {"intermediate_size": 128, "image_size": 56}
        config = Aimv2VisionConfig(use_head=False, is_native=native, **({} if size == "real" else small))
        side = 224 if size == "real" else 70 if native else 56
        return save_seeded(Aimv2VisionModel(config), folder, clip_processor(side), sharpen=3.0)

    return write


def class_token(prefix: int) -> Answer:
    """The class token after the last norm; patches follow after `prefix` tokens."""

    def answer(model: Any, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = model(pixel_values=pixels).last_hidden_state
        return hidden[:, 0], hidden[:, prefix:]

    return answer


def mean_of_patches(model: Any, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = model(pixel_values=pixels).last_hidden_state
    return hidden.mean(dim=1), hidden


BIT = processor_inputs(BitImageProcessor, BitImageProcessorPil)
CLIP = processor_inputs(CLIPImageProcessor, CLIPImageProcessorPil)
LAYERS = layers_of("num_hidden_layers")
AIMV2 = model_oracle(Aimv2VisionModel, mean_of_patches)

CASES = [
    Case("dinov2-b-14", "dinov2", write_dinov2, BIT, model_oracle(Dinov2Model, class_token(1)), LAYERS),
    Case(
        "dinov2-registers-b-14", "dinov2_with_registers", write_dinov2_registers, BIT,
        model_oracle(Dinov2WithRegistersModel, class_token(1 + REGISTERS)), LAYERS,
    ),
    Case(
        "dinov3-b-16", "dinov3_vit", write_dinov3, processor_inputs(DINOv3ViTImageProcessor),
        model_oracle(DINOv3ViTModel, class_token(1 + REGISTERS)), LAYERS, modes=("torch",),
    ),
    Case(
        "vit-b-16", "vit", write_vit, processor_inputs(ViTImageProcessor, ViTImageProcessorPil),
        model_oracle(ViTModel, class_token(1)), LAYERS,
    ),
    Case("aimv2-l-14", "aimv2", aimv2_writer(native=False), CLIP, AIMV2, LAYERS),
    Case("aimv2-l-14-native", "aimv2", aimv2_writer(native=True), CLIP, AIMV2, LAYERS),
]  # fmt: skip
