"""Pixels for the demo model, made as the serving transform makes them."""

import numpy as np
import torch
from PIL import Image

MEAN = (0.48145466, 0.4578275, 0.40821073)  # CLIP's, from transformers' OPENAI_CLIP_MEAN and _STD
STD = (0.26862954, 0.26130258, 0.27577711)


def to_pixels(picture: Image.Image, side: int) -> torch.Tensor:
    """Resize the shorter edge to `side` (uint8, antialiased bicubic) and crop the centre: uint8 [3, side, side]."""
    levels = torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1)
    height, width = levels.shape[1:]
    short = min(height, width)
    resized = torch.nn.functional.interpolate(
        levels[None],
        size=(int(side * height / short), int(side * width / short)),
        mode="bicubic",
        antialias=True,
    )[0]
    top, left = (resized.shape[1] - side) // 2, (resized.shape[2] - side) // 2
    return resized[:, top : top + side, left : left + side].contiguous()


def normalise(pixels: torch.Tensor) -> torch.Tensor:
    """uint8 [..., 3, H, W] to float32, scaled to 0..1 and normalised with CLIP's mean and deviation."""
    mean, std = torch.tensor(MEAN).view(3, 1, 1), torch.tensor(STD).view(3, 1, 1)
    return (pixels.float() / 255 - mean) / std
