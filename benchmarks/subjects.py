"""What is measured: a checkpoint of real size with seeded weights, pictures and texts by formula."""

import io
from pathlib import Path

import numpy as np
from PIL import Image

FOLDER = Path(__file__).resolve().parents[1] / ".cache" / "benchmarks"
WIDTH, HEIGHT = 640, 480
# Multiply-adds of ViT-B/32 at 224 pixels, counted twice, as floating-point operations are.
HIDDEN, INTERMEDIATE, LAYERS, TOKENS, PATCHES, PATCH_INPUTS = 768, 3072, 12, 50, 49, 3072


def gemms(batch: int) -> list[tuple[int, int, int, int]]:
    """The tower's matrix products: how often, rows, inner, columns."""
    rows = batch * TOKENS
    return [
        (1, batch * PATCHES, PATCH_INPUTS, HIDDEN),
        (4 * LAYERS, rows, HIDDEN, HIDDEN),
        (LAYERS, rows, HIDDEN, INTERMEDIATE),
        (LAYERS, rows, INTERMEDIATE, HIDDEN),
    ]


def operations_per_image() -> float:
    """8.8 GFLOP: the products above and attention's own two."""
    products = sum(count * 2 * rows * inner * columns for count, rows, inner, columns in gemms(1))
    return float(products + LAYERS * 2 * 2 * TOKENS * TOKENS * HIDDEN)


def checkpoint() -> Path:
    """CLIP ViT-B/32 with both towers and CLIP's own vocabulary; made once, about 600 MB."""
    from tests.support.checkpoints import VIT_B_32, write_clip
    from tests.support.clip_vocab import clip_tokenizer_folder

    folder = FOLDER / "vit-b-32"
    if not (folder / "vocab.json").exists():
        write_clip(folder, VIT_B_32)
        for file in clip_tokenizer_folder().iterdir():
            (folder / file.name).write_bytes(file.read_bytes())
    return folder


def jpegs(count: int, width: int = WIDTH, height: int = HEIGHT, quality: int = 85, seed: int = 0) -> list[bytes]:
    """Pictures as a camera's: smooth shapes with some grain, 4:2:0, about 60 KB at 640×480."""
    rng = np.random.default_rng(seed)
    made = []
    for _ in range(count):
        coarse = Image.fromarray(rng.integers(0, 256, (12, 16, 3), dtype=np.uint8))
        smooth = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC), dtype=np.float32)
        grain = rng.normal(0, 6, (height, width, 1))
        stream = io.BytesIO()
        pixels = np.clip(smooth + grain, 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(stream, "JPEG", quality=quality)
        made.append(stream.getvalue())
    return made


def captions(count: int) -> list[str]:
    """Texts of six to a dozen words, as search queries are."""
    things = ["dog", "red bicycle", "mountain lake", "old man with a hat", "bowl of fruit", "city street at night"]
    places = ["in the snow", "next to a window", "under a blue sky", "on a wooden table", "in front of a house"]
    return [
        f"a photo of a {things[i % len(things)]} {places[i // len(things) % len(places)]}, number {i}"
        for i in range(count)
    ]
