"""Pictures good, odd and broken for the end-to-end tests, and transformers' own vectors of the good ones."""

import io
import struct
import zlib
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from transformers import CLIPModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from encoder.demo import demo_model_path

WHITE = (255, 255, 255)


def encoded(pixels: np.ndarray, kind: str = "PNG", mode: str | None = None) -> bytes:
    """A picture file of uint8 pixels."""
    stream = io.BytesIO()
    picture = Image.fromarray(pixels)
    (picture.convert(mode) if mode else picture).save(stream, kind)
    return stream.getvalue()


def good_pictures() -> list[bytes]:
    """Different from each other: plain and textured ones of several sizes and formats, and odd but good ones."""
    rng = np.random.default_rng(11)
    found = []
    for index in range(40):
        height, width = [(96, 128), (64, 64), (240, 320), (77, 201)][index % 4]
        coarse = Image.fromarray(rng.integers(0, 256, (3 + index % 3, 4, 3), dtype=np.uint8))
        pixels = np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC))
        found.append(encoded(pixels, ("JPEG", "PNG", "WEBP")[index % 3]))
    found.append(encoded(np.full((1, 1, 3), (200, 30, 30), np.uint8)))
    found.append(encoded(rng.integers(0, 256, (2000, 1, 3), dtype=np.uint8)))
    found.append(encoded(rng.integers(0, 256, (1, 2000, 3), dtype=np.uint8)))
    found.append(encoded(np.tile(np.arange(0, 240, 2, dtype=np.uint8), (90, 1)), "JPEG"))
    alpha = np.dstack(
        [np.full((80, 80, 3), (10, 200, 90), np.uint8), np.tile(np.arange(80, dtype=np.uint8) * 3, (80, 1))]
    )
    found.append(encoded(alpha))
    found.append(encoded(np.tile(np.arange(0, 255, 3, dtype=np.uint8), (60, 1)), mode="P"))
    return found


def broken_pictures() -> dict[str, bytes]:
    """What a caller may send instead of a picture, by what it is."""
    photo = encoded(np.random.default_rng(2).integers(0, 256, (200, 300, 3), dtype=np.uint8), "JPEG")
    return {
        "empty": b"",
        "truncated JPEG": photo[: len(photo) // 2],
        "text": b"this is no picture, whatever its name says",
        "60000x60000": huge_png_header(60_000, 60_000),
        "truncated PNG": encoded(np.zeros((50, 50, 3), np.uint8))[:60],
        "only a JPEG's first bytes": photo[:4],
    }


def huge_png_header(width: int, height: int) -> bytes:
    """A PNG that claims to be enormous and holds next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 64)) + chunk(b"IEND", b"")
    )


def expected_vectors(pictures: Sequence[bytes]) -> np.ndarray:
    """transformers' vectors float64 [n, D] of length 1, float32 inside, alpha laid on white as the service states."""
    model = CLIPModel.from_pretrained(demo_model_path(), attn_implementation="eager").float().eval()
    processor = CLIPImageProcessorPil.from_pretrained(demo_model_path())
    flat = []
    for data in pictures:
        picture = Image.open(io.BytesIO(data)).convert("RGBA")
        flat.append(Image.alpha_composite(Image.new("RGBA", picture.size, WHITE), picture).convert("RGB"))
    pixels = torch.from_numpy(np.stack([processor(picture, return_tensors="np").pixel_values[0] for picture in flat]))
    with torch.inference_mode():
        vectors = model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output).double().numpy()
    unit: np.ndarray = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    return unit
