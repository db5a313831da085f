"""From JPEG bytes to the tower's input: both modes against transformers' PIL processor, and by threads."""

import io
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.results import arguments_of, publish, say
from benchmarks.subjects import HEIGHT, WIDTH, checkpoint, jpegs

SECONDS = 4.0


def best_ms(run: Callable[[bytes], object], pictures: Sequence[bytes], seconds: float = SECONDS) -> float:
    """Milliseconds a picture, of the quickest round over all pictures."""
    rounds: list[float] = []
    until = time.perf_counter() + seconds
    while len(rounds) < 3 or time.perf_counter() < until:
        started = time.perf_counter()
        for picture in pictures:
            run(picture)
        rounds.append((time.perf_counter() - started) / len(pictures) * 1e3)
    return min(rounds)


def peers() -> Callable[[bytes], object]:
    """Pillow's decode and transformers' PIL processor, as its users write it."""
    from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

    processor = CLIPImageProcessorPil.from_pretrained(checkpoint())
    return lambda data: processor(Image.open(io.BytesIO(data)).convert("RGB"), return_tensors="np").pixel_values


def ours(mode: str) -> Callable[[bytes], object]:
    """Decode, resize, crop and normalise, as the engine does it."""
    from encoder.models.checkpoint import read_json
    from encoder.preprocess.decode import DecodeLimits, DecodePolicy, decode_image
    from encoder.preprocess.transform import ImageTransform

    transform = ImageTransform.from_config(read_json(checkpoint() / "preprocessor_config.json"), mode)  # type: ignore[arg-type]
    limits, policy = DecodeLimits(), DecodePolicy()

    def run(data: bytes) -> np.ndarray:
        return transform.normalize(transform.resize_crop(decode_image(data, limits, policy))[None])

    return run


def by_threads(run: Callable[[bytes], object], pictures: Sequence[bytes], threads: int) -> float:
    """Pictures a second through a pool of so many threads, as a replica has."""
    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(run, pictures))
        best = 0.0
        for _ in range(5):
            started = time.perf_counter()
            list(pool.map(run, pictures))
            best = max(best, len(pictures) / (time.perf_counter() - started))
    return best


def main() -> None:
    """Prints and writes preprocess.json."""
    parser = arguments_of(__doc__)
    parser.add_argument("--pictures", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="for each of the three ways")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    pictures = jpegs(arguments.pictures)
    rows: list[dict[str, Any]] = []
    say("Pillow and transformers' PIL processor")
    peer_ms = best_ms(peers(), pictures, arguments.seconds)
    rows.append({"what": "Pillow + transformers PIL processor", "ms": peer_ms, "pictures/s": 1e3 / peer_ms})
    for mode in ("torch", "pil"):
        say(f"mode {mode}")
        run = ours(mode)
        mode_ms = best_ms(run, pictures, arguments.seconds)
        rows.append(
            {"what": f"vitfleet {mode}", "ms": mode_ms, "pictures/s": 1e3 / mode_ms, "times": peer_ms / mode_ms}
        )
        for threads in (1, 2, 4):
            rate = by_threads(run, pictures, threads)
            rows.append({"what": f"vitfleet {mode}, pool of {threads}", "ms": None, "pictures/s": rate})
    publish("preprocess", f"JPEG {WIDTH}×{HEIGHT} to normalised pixels, one thread", rows, folder=arguments.folder)


if __name__ == "__main__":
    main()
