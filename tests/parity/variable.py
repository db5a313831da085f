"""Vision towers of pictures of many sizes, packed (SigLIP2 NaFlex, the Qwens), in tiles (Mllama), and InternViT."""

import json
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from transformers import (
    InternVLVisionConfig,
    InternVLVisionModel,
    MllamaForConditionalGeneration,
    Siglip2Model,
)
from transformers.models.got_ocr2.image_processing_pil_got_ocr2 import GotOcr2ImageProcessorPil
from transformers.models.mllama.image_processing_pil_mllama import MllamaImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.siglip2.image_processing_pil_siglip2 import Siglip2ImageProcessorPil
from transformers.vision_utils import get_vision_position_ids, get_vision_window_index

from tests.parity.cases import Case, Expected, Inputs, Mode, Size
from tests.parity.oracles import SEED, layers_of, model_oracle, processor_inputs, save_seeded
from tests.preprocess.torchvision_stand_in import torchvision_stand_in
from tests.support.variable_families import MLLAMA_VISION, QWEN, write_mllama, write_naflex, write_qwen

with torchvision_stand_in():
    from transformers.models.got_ocr2.image_processing_got_ocr2 import GotOcr2ImageProcessor
    from transformers.models.mllama.image_processing_mllama import MllamaImageProcessor
    from transformers.models.qwen2_vl.image_processing_qwen2_vl import Qwen2VLImageProcessor
    from transformers.models.siglip2.image_processing_siglip2 import Siglip2ImageProcessor

PACKED = {"openvino": "it takes no packed batches: the CPU serves them eager"}
# Of the published models, their pictures held to 256 patches so that a CPU gets through sixty-four of them.
REAL_QWEN: dict[str, dict[str, Any]] = {
    "qwen2_vl": {"depth": 32, "embed_dim": 1280, "hidden_size": 1536, "num_heads": 16, "patch_size": 14},
    "qwen2_5_vl": {
        "depth": 32, "hidden_size": 1280, "out_hidden_size": 2048, "intermediate_size": 3420, "num_heads": 16,
        "patch_size": 14, "window_size": 112, "fullatt_block_indexes": [7, 15, 23, 31],
    },
    "qwen3_vl": {
        "depth": 24, "hidden_size": 1024, "out_hidden_size": 2048, "intermediate_size": 4096, "num_heads": 16,
        "patch_size": 16, "num_position_embeddings": 2304, "deepstack_visual_indexes": [5, 11, 17],
    },
}  # fmt: skip
REAL_NAFLEX = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "patch_size": 16, "num_patches": 256,
}  # fmt: skip
# Width and depth of Llama 3.2 11B Vision; tiles of 140 pixels in the place of 560, of 100 patches each.
REAL_MLLAMA = MLLAMA_VISION | {
    "hidden_size": 1280, "intermediate_size": 5120, "num_hidden_layers": 32, "num_global_layers": 8,
    "attention_heads": 16, "image_size": 140, "patch_size": 14, "intermediate_layers_indices": [3, 7, 15, 23, 30],
    "vision_output_dim": 7680,
}  # fmt: skip
SMALL_INTERN = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 56,
}


def processed(torch_class: Any, pil_class: Any, folder: Path, mode: Mode, image: Any) -> Any:
    """What the publisher's processor makes of one picture."""
    config = json.loads((folder / "preprocessor_config.json").read_text())
    config = {key: value for key, value in config.items() if not key.endswith("_type")}
    if mode == "pil":
        return pil_class(**config)(image, return_tensors="pt")
    with torchvision_stand_in():
        return torch_class(**config)(image, return_tensors="pt")


def places_of(index: torch.Tensor, rows: int, columns: int) -> torch.Tensor:
    """[T, 4]: row and column [T, 2] of each patch, and the picture's rows and columns."""
    return torch.cat([index, torch.tensor([rows, columns]).expand(len(index), 2)], dim=1)


def write_real_or_small_naflex(folder: Path, size: Size) -> Path:
    if size == "small":
        return write_naflex(folder)
    return write_naflex(folder, REAL_NAFLEX, patches=256, by=1.5)


def naflex_inputs(folder: Path, mode: Mode, pictures: Sequence[Image.Image]) -> list[Inputs]:
    found: list[Inputs] = []
    for picture in pictures:
        made = processed(Siglip2ImageProcessor, Siglip2ImageProcessorPil, folder, mode, picture)
        patches = made["pixel_values"][0][made["pixel_attention_mask"][0].bool()]
        rows, columns = made["spatial_shapes"][0].tolist()
        index = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).reshape(-1, 2)
        ends = torch.tensor([0, len(patches)], dtype=torch.int32)
        found.append({"patches": patches, "places": places_of(index, rows, columns), "cu_seqlens": ends})
    return found


def naflex_oracle(folder: Path, inputs: Sequence[Inputs]) -> Expected:
    model = Siglip2Model.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32).eval().vision_model
    vectors, features = [], []
    for one in inputs:
        mask = torch.ones(1, len(one["patches"]), dtype=torch.int32)
        with torch.inference_mode():
            found = model(one["patches"][None], pixel_attention_mask=mask, spatial_shapes=one["places"][:1, 2:])
        vectors.append(found.pooler_output.numpy())
        features.append(found.last_hidden_state[0].numpy())
    return Expected(np.concatenate(vectors), features)


def write_real_or_small_qwen(family: str, folder: Path, size: Size) -> Path:
    if size == "small":
        return write_qwen(family, folder)
    # A gated MLP multiplies two widened products: on 16 patches of noise transformers' own bfloat16 has a cosine of
    # 0.991 to its own float32 at 1.5, of 0.9991 at 1.25 and of 0.9998 at 1.1.
    widen = 1.1 if family == "qwen2_5_vl" else 1.5
    return write_qwen(family, folder, REAL_QWEN[family], patches=256, widen=widen, max_shard_size="1GB")


def qwen_inputs(folder: Path, mode: Mode, pictures: Sequence[Image.Image]) -> list[Inputs]:
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    patch, found = vision["patch_size"], []
    for picture in pictures:
        made = processed(Qwen2VLImageProcessor, Qwen2VLImageProcessorPil, folder, mode, picture)
        frames = made["pixel_values"].unflatten(1, (3, 2, patch * patch))
        assert torch.equal(frames[:, :, 0], frames[:, :, 1])
        grid = made["image_grid_thw"]
        one = {
            "patches": frames[:, :, 0].flatten(1),
            "places": places_of(get_vision_position_ids(grid, 2), *grid[0, 1:].tolist()),
            "cu_seqlens": torch.tensor([0, len(frames)], dtype=torch.int32),
        }
        if "window_size" in vision:
            order, ends = get_vision_window_index(grid, 2, vision["window_size"], patch)
            one = {name: in_blocks(tensor, order) if name != "cu_seqlens" else tensor for name, tensor in one.items()}
            one |= {"return_index": order.argsort().repeat_interleave(4), "cu_window_seqlens": ends.int()}
        found.append(one)
    return found


def in_blocks(tokens: torch.Tensor, order: torch.Tensor) -> torch.Tensor:
    """[T, ...] with its blocks of four in another order."""
    return tokens.unflatten(0, (-1, 4))[order].flatten(0, 1)


def qwen_oracle(family: str, folder: Path, inputs: Sequence[Inputs]) -> Expected:
    whole = QWEN[family][1].from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    model, vectors, features = whole.model.visual.eval(), [], []
    for one in inputs:
        grid = torch.tensor([[1, *one["places"][0, 2:].tolist()]])
        patches = in_blocks(one["patches"], one["return_index"][::4]) if "return_index" in one else one["patches"]
        frames = patches.unflatten(1, (3, 1, -1)).expand(-1, -1, 2, -1).flatten(1)
        with torch.inference_mode():
            features.append(model(frames, grid_thw=grid).pooler_output.numpy())
        vectors.append(features[-1].mean(axis=0))
    return Expected(np.stack(vectors), features)


def qwen(name: str, family: str) -> Case:
    """A case of one of the three."""
    return Case(
        name, family, partial(write_real_or_small_qwen, family), qwen_inputs, partial(qwen_oracle, family),
        layers_of("vision_config", "depth"), skip=PACKED,
    )  # fmt: skip


def write_real_or_small_mllama(folder: Path, size: Size) -> Path:
    return write_mllama(folder) if size == "small" else write_mllama(folder, REAL_MLLAMA, widen=1.5)


def mllama_inputs(folder: Path, mode: Mode, pictures: Sequence[Image.Image]) -> list[Inputs]:
    found: list[Inputs] = []
    for picture in pictures:
        made = processed(MllamaImageProcessor, MllamaImageProcessorPil, folder, mode, [[picture]])
        names = ("pixel_values", "aspect_ratio_mask")
        one = {name: torch.as_tensor(made[name])[0] for name in names}
        found.append({**one, "aspect_ratio_ids": torch.as_tensor(made["aspect_ratio_ids"])})
    return found


def mllama_oracle(folder: Path, inputs: Sequence[Inputs]) -> Expected:
    whole = MllamaForConditionalGeneration.from_pretrained(folder, attn_implementation="eager", dtype=torch.float32)
    model, vectors, features = whole.model.vision_model.eval(), [], []
    for one in inputs:
        tiles = int(one["aspect_ratio_mask"].sum())
        with torch.inference_mode():
            found = model(
                one["pixel_values"][:, None],
                aspect_ratio_ids=one["aspect_ratio_ids"],
                aspect_ratio_mask=one["aspect_ratio_mask"][:, None],
            ).last_hidden_state
        features.append(found[0, 0, :tiles, 1:].flatten(0, 1).numpy())
        vectors.append(features[-1].mean(axis=0))
    return Expected(np.stack(vectors), features)


def mllama_layers(folder: Path) -> int:
    vision = json.loads((folder / "config.json").read_text())["vision_config"]
    return int(vision["num_hidden_layers"] + vision["num_global_layers"])


def naflex_layers(folder: Path) -> int:
    """Its pooling head attends as well."""
    return 1 + layers_of("vision_config", "num_hidden_layers")(folder)


def write_internvl(folder: Path, size: Size, *, mean_pooling: bool = True) -> Path:
    """InternViT-300M, as InternVL3-1B has it."""
    torch.manual_seed(SEED)
    small = {} if size == "real" else SMALL_INTERN
    config = InternVLVisionConfig(attention_bias=True, use_mean_pooling=mean_pooling, **small)
    side = config.image_size[0]
    processor = {
        "image_processor_type": "GotOcr2ImageProcessorFast", "do_resize": True, "resample": 3, "do_rescale": True,
        "size": {"height": side, "width": side}, "rescale_factor": 1 / 255, "do_normalize": True,
        "image_mean": [0.485, 0.456, 0.406], "image_std": [0.229, 0.224, 0.225], "crop_to_patches": False,
        "min_patches": 1, "max_patches": 12,
    }  # fmt: skip
    return save_seeded(InternVLVisionModel(config), folder, processor, sharpen=3.0)


def internvl_answer(model: Any, pixels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = model(pixel_values=pixels).last_hidden_state
    return hidden[:, 1:].mean(dim=1) if model.config.use_mean_pooling else hidden[:, 0], hidden[:, 1:]


def internvl(name: str, write: Callable[[Path, Size], Path]) -> Case:
    """A case of either way of pooling."""
    return Case(
        name, "internvl", write, processor_inputs(GotOcr2ImageProcessor, GotOcr2ImageProcessorPil),
        model_oracle(InternVLVisionModel, internvl_answer), layers_of("num_hidden_layers"),
    )  # fmt: skip


CASES = [
    Case(
        "siglip2-naflex-b-16", "siglip2", write_real_or_small_naflex, naflex_inputs, naflex_oracle, naflex_layers,
        skip=PACKED,
    ),
    qwen("qwen2-vl-2b", "qwen2_vl"),
    qwen("qwen2.5-vl-3b", "qwen2_5_vl"),
    qwen("qwen3-vl-2b", "qwen3_vl"),
    internvl("internvit-300m", write_internvl),
    internvl("internvit-300m-class-token", partial(write_internvl, mean_pooling=False)),
    Case(
        "mllama-11b-140px", "mllama", write_real_or_small_mllama, mllama_inputs, mllama_oracle, mllama_layers,
        buckets=(1, 4),
    ),
]  # fmt: skip
