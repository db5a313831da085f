"""The demo's CLIP: its size, how it starts, and a cheaper forward pass for training."""

import torch
from torch.nn.functional import max_pool2d, normalize
from transformers import CLIPConfig, CLIPModel, CLIPTokenizer

from encoder.demo.pixels import normalise
from encoder.demo.tokenizer import CONTEXT

SIDE, PATCH, WIDTH, HEADS, LAYERS, PROJECTION = 64, 8, 128, 2, 4, 64
GRID = SIDE // PATCH
ALL_PATCHES = GRID * GRID


def new_model(tokenizer: CLIPTokenizer) -> CLIPModel:
    """An untrained model for the tokenizer's vocabulary, drawn from torch's global generator."""
    tower = {
        "hidden_size": WIDTH,
        "intermediate_size": 2 * WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "projection_dim": PROJECTION,
    }
    text = {
        "vocab_size": len(tokenizer),
        "max_position_embeddings": CONTEXT,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,  # the true id: transformers pools at its first place
        "pad_token_id": tokenizer.pad_token_id,
    }
    vision = {"image_size": SIDE, "patch_size": PATCH}
    model = CLIPModel(CLIPConfig(text_config=tower | text, vision_config=tower | vision, projection_dim=PROJECTION))
    with torch.no_grad():
        # transformers starts both near zero; places and patches that stand out from the start are learnt far sooner
        model.vision_model.embeddings.position_embedding.weight[1:] = 0.4 * waves_of_places()
        model.vision_model.embeddings.patch_embedding.weight.mul_(2)
    return model


def waves_of_places() -> torch.Tensor:
    """Sines and cosines of each patch's column and row, float32 [ALL_PATCHES, WIDTH]."""
    frequencies = 100 ** -(torch.arange(WIDTH // 4) / (WIDTH // 4))
    rows, columns = torch.meshgrid(torch.arange(GRID), torch.arange(GRID), indexing="ij")
    angles = [place.flatten()[:, None] * frequencies for place in (columns, rows)]
    return torch.cat([wave for angle in angles for wave in (angle.sin(), angle.cos())], dim=1)


def salient_patches(pixels: torch.Tensor, keep: int) -> torch.Tensor:
    """The `keep` patches that differ most from their picture's median colour, int64 [N, keep], in order."""
    levels = pixels.float()
    median = levels.flatten(2).median(-1).values[:, :, None, None]
    apart = max_pool2d((levels - median).abs().sum(1, keepdim=True), PATCH).flatten(1)
    return apart.topk(keep, dim=1).indices.sort(1).values


def training_image_embeddings(model: CLIPModel, pixels: torch.Tensor, keep: int) -> torch.Tensor:
    """Unit embeddings [N, PROJECTION] of uint8 pixels, seen through the `keep` most telling patches alone.

    Half of a picture's patches are empty ground; leaving them out halves the vision tower's work. With all patches
    kept this is the model's own forward pass.
    """
    tower = model.vision_model
    patches = tower.embeddings(normalise(pixels))
    if keep < ALL_PATCHES:
        class_token = torch.zeros(len(pixels), 1, dtype=torch.long)
        kept = torch.cat([class_token, 1 + salient_patches(pixels, keep)], dim=1)
        patches = patches.gather(1, kept[..., None].expand(-1, -1, WIDTH))
    hidden = tower.encoder(tower.pre_layrnorm(patches)).last_hidden_state
    return normalize(model.visual_projection(tower.post_layernorm(hidden[:, 0])), dim=-1)
