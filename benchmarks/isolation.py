"""What a decode worker costs a picture: the same files decoded on the thread and in a worker process."""

import io
from typing import Any

import psutil

from benchmarks.preprocess import best_ms
from benchmarks.results import arguments_of, publish, say
from benchmarks.subjects import HEIGHT, WIDTH, jpegs
from encoder.preprocess.isolation import Decoder
from encoder.preprocess.policy import DecodeLimits, DecodePolicy

FORMATS: tuple[tuple[str, dict[str, Any]], ...] = (
    ("JPEG", {"quality": 90}),
    ("PNG", {}),
    ("WEBP", {"quality": 80}),
    ("AVIF", {"quality": 60}),
    ("TIFF", {"compression": "tiff_lzw"}),
)


def main() -> None:
    """Prints and writes isolation.json."""
    from PIL import Image

    parser = arguments_of(__doc__)
    parser.add_argument("--seconds", type=float, default=1.0, help="for each format and way")
    options = parser.parse_args()
    sources = [Image.open(io.BytesIO(data)).convert("RGB") for data in jpegs(8)]
    on_thread = Decoder(DecodeLimits(), DecodePolicy(), "thread")
    in_worker = Decoder(DecodeLimits(), DecodePolicy(), "process")
    rows: list[dict[str, Any]] = []
    for name, settings in FORMATS:
        say(name)
        files = []
        for image in sources:
            buffer = io.BytesIO()
            image.save(buffer, name, **settings)
            files.append(buffer.getvalue())
        thread_ms = best_ms(on_thread.decode, files, options.seconds)
        worker_ms = best_ms(in_worker.decode, files, options.seconds)
        rows.append(
            {"what": name, "thread ms": thread_ms, "worker ms": worker_ms, "worker costs ms": worker_ms - thread_ms}
        )
    memory = max(psutil.Process(pid).memory_info().rss for pid in in_worker.worker_pids)
    rows.append({"what": "a worker's memory", "MiB": memory / 2**20})
    in_worker.close()
    publish("isolation", f"{WIDTH}×{HEIGHT} to pixels, one thread", rows, folder=options.folder)


if __name__ == "__main__":
    main()
