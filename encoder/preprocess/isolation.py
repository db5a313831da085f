"""Where a picture is decoded: on the thread that asks, or in a worker process that may crash or hang.

| isolation | on the thread                                | in a worker                                             |
|-----------|----------------------------------------------|---------------------------------------------------------|
| `thread`  | everything, without a time limit             | nothing                                                 |
| `auto`    | JPEG and PNG of ordinary kind and size       | the rest: WebP, GIF, BMP, TIFF, AVIF, rare or huge ones |
| `process` | nothing                                      | everything                                              |

Both give the same pixels.
"""

from typing import Literal

import numpy as np

from encoder.preprocess.decode import decode_image, decode_light
from encoder.preprocess.policy import DecodeLimits, DecodePolicy
from encoder.preprocess.workers import DecodeWorkers

Isolation = Literal["auto", "thread", "process"]


class Decoder:
    """Decodes by one set of limits and policies. Any number of threads; ended with `close`."""

    def __init__(
        self, limits: DecodeLimits, policy: DecodePolicy, isolation: Isolation = "auto", time_limit_s: float = 20.0
    ) -> None:
        self.limits = limits
        self.policy = policy
        self.isolation = isolation
        self._workers = DecodeWorkers(limits, policy, time_limit_s)

    def decode(self, data: bytes | memoryview) -> np.ndarray:
        """RGB uint8 [h, w, 3], contiguous and writable. Raises InvalidImage; DecoderLost when a worker goes away."""
        if self.isolation == "thread":
            return decode_image(data, self.limits, self.policy)
        if self.isolation == "auto":
            pixels = decode_light(data, self.limits, self.policy)
            if pixels is not None:
                return pixels
        else:
            self.limits.check_bytes(memoryview(data).nbytes)
        return self._workers.decode(data)

    def start(self, workers: int) -> None:
        """Starts workers ahead of the first picture that needs one."""
        if self.isolation != "thread":
            self._workers.start(workers)

    @property
    def worker_pids(self) -> list[int]:
        return self._workers.pids

    def counters(self) -> dict[str, int]:
        """Pictures decoded in workers, and workers that were lost."""
        return self._workers.counters()

    def close(self) -> None:
        """Ends all workers."""
        self._workers.close()
