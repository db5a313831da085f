"""A decode worker whose fate the last bytes of a picture decide; all others are decoded as ever."""

import os
import signal
import sys
import time
from pathlib import Path

import numpy as np

from encoder.preprocess import worker
from encoder.preprocess.decode import DecodeLimits, DecodePolicy, decode_image


def decode(content: bytes, limits: DecodeLimits, policy: DecodePolicy) -> np.ndarray:
    if content.endswith(b"SLEEP"):
        Path("/proc/self/comm").write_text("asleep")
        time.sleep(600)
    if content.endswith(b"CRASH"):
        os.kill(os.getpid(), signal.SIGSEGV)
    if content.endswith(b"LEAVE"):
        os._exit(7)
    if content.endswith(b"RAISE"):
        raise RuntimeError("not of the project")
    if content.endswith(b"SHAPE"):  # tells of pixels that are not there
        os.write(sys.stdout.fileno(), worker.ANSWER.pack(True, 900, 900, 0))
        time.sleep(600)
    if content.endswith(b"GIANT"):  # tells of pixels beyond the limits
        os.write(sys.stdout.fileno(), worker.ANSWER.pack(True, 1 << 31, 1 << 31, 0))
        time.sleep(600)
    if content.endswith(b"GREED"):
        return np.ones((60_000, 60_000, 3), dtype=np.uint8)
    return decode_image(content, limits, policy)


def main() -> None:
    worker.main(decode)
