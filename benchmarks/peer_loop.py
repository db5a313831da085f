"""A library in a loop, as its users write it: JPEG bytes in, vectors out, in this process; prints JSON.

transformers: PIL decode, the checkpoint's own processor, get_image_features. sentence-transformers: encode().
"""

import argparse
import io
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.subjects import captions, checkpoint, jpegs

Encode = Callable[[Sequence[Any]], np.ndarray]
PICTURES = 64


def picture(data: bytes) -> Image.Image:
    """Decoded."""
    return Image.open(io.BytesIO(data)).convert("RGB")


def transformers_loop(dtype: str) -> tuple[Encode, Encode]:
    """Encoders of pictures and of texts."""
    from transformers import AutoModel, AutoProcessor

    model = AutoModel.from_pretrained(checkpoint(), dtype=getattr(torch, dtype)).eval()
    processor = AutoProcessor.from_pretrained(checkpoint())

    def vectors(output: Any) -> np.ndarray:
        pooled = output if isinstance(output, torch.Tensor) else output.pooler_output
        array: np.ndarray = torch.nn.functional.normalize(pooled.float(), dim=-1).numpy()
        return array

    @torch.inference_mode()
    def images(batch: Sequence[bytes]) -> np.ndarray:
        inputs = processor(images=[picture(data) for data in batch], return_tensors="pt")
        return vectors(model.get_image_features(pixel_values=inputs.pixel_values.to(model.dtype)))

    @torch.inference_mode()
    def texts(batch: Sequence[str]) -> np.ndarray:
        inputs = processor(text=list(batch), return_tensors="pt", padding=True, truncation=True)
        return vectors(model.get_text_features(**inputs))

    return images, texts


def sentence_transformers_loop(dtype: str, folder: str) -> tuple[Encode, Encode]:
    """Encoders of pictures and of texts; `folder` is where the package lies."""
    sys.path.insert(0, folder)
    from sentence_transformers import SentenceTransformer  # type: ignore[import-not-found]

    model = SentenceTransformer(str(checkpoint()), device="cpu", model_kwargs={"dtype": dtype})

    def encode(items: Sequence[Any]) -> np.ndarray:
        array: np.ndarray = model.encode(
            list(items), batch_size=32, normalize_embeddings=True, show_progress_bar=False
        ).astype(np.float32)
        return array

    return (lambda batch: encode([picture(data) for data in batch])), encode


def timed(encode: Encode, items: Sequence[Any], batch: int, seconds: float) -> list[float]:
    """Seconds of each batch that fits into `seconds`, at least three."""
    groups = [items[start : start + batch] for start in range(0, len(items), batch)]
    encode(groups[0])
    taken: list[float] = []
    until = time.perf_counter() + seconds
    while len(taken) < 3 or time.perf_counter() < until:
        begun = time.perf_counter()
        encode(groups[len(taken) % len(groups)])
        taken.append(time.perf_counter() - begun)
    return taken


def main() -> None:
    """One library in one dtype: rates of pictures by batch, of texts at the largest, p50 of the smallest."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("library", choices=["transformers", "sentence-transformers"])
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--seconds", type=float, default=4.0, help="for each batch")
    parser.add_argument("--folder", default="", help="where sentence-transformers lies")
    parser.add_argument("--vectors", type=Path, help="where the vectors of the first eight pictures go, as .npy")
    options = parser.parse_args()
    torch.set_num_threads(os.cpu_count() or 1)
    if options.library == "transformers":
        images, texts = transformers_loop(options.dtype)
    else:
        images, texts = sentence_transformers_loop(options.dtype, options.folder)
    pictures = jpegs(PICTURES)
    found: dict[str, Any] = {}
    for batch in options.batches:
        taken = timed(images, pictures, batch, options.seconds)
        found[f"images/s {batch}"] = batch * len(taken) / sum(taken)
        found[f"p50 ms {batch}"] = float(np.median(taken)) * 1e3
    taken = timed(texts, captions(PICTURES), max(options.batches), options.seconds)
    found["texts/s"] = max(options.batches) * len(taken) / sum(taken)
    if options.vectors:
        np.save(options.vectors, images(pictures[:8]))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
