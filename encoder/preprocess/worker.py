"""A process that decodes pictures for another one, so that a decoder's crash or hang costs one picture and no replica.

Started by `encoder.preprocess.workers` as `python -m encoder.preprocess.worker`. A request on stdin says how many bytes
of the shared memory file are the picture; the pixels are written over them, and the answer on stdout gives their size,
or the reason why there are none. Imports neither torch nor ray.

It ends when stdin does. While it decodes, an alarm that no handler catches ends it soon after the time limit, also when
its parent has gone and the decoder hangs in C code; and it may take only so much memory.
"""

import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Callable
from functools import partial

import numpy as np

from encoder.errors import InvalidImage
from encoder.preprocess.decode import DecodeLimits, DecodePolicy, decode_image

Decode = Callable[[bytes], np.ndarray]
READY = b"\x01"
REQUEST = struct.Struct("<Q")  # bytes of the picture
ANSWER = struct.Struct("<?III")  # whether there are pixels; their height and width; bytes of the message that follows
MAX_MESSAGE_BYTES = 2048
# Its own alarm comes after the parent had the time to end it in its own way.
ALARM_GRACE_S = 2.0
# What a picture takes at most, in bytes a pixel: the sums of Pillow's copies while alpha is composited.
BYTES_PER_PIXEL = 28
MEMORY_BESIDE_PIXELS = 768 * 1024 * 1024
# Pixels of a picture after which freed memory goes back to the system.
LARGE_BYTES = 16 * 1024 * 1024


def serve(memory: int, time_limit_s: float, decode: Decode) -> None:
    """Answers requests until stdin ends. `memory`: descriptor of the shared memory file."""
    requests, answers = sys.stdin.fileno(), sys.stdout.fileno()
    give_back_memory = ctypes.CDLL(None).malloc_trim
    os.write(answers, READY)
    while request := os.read(requests, REQUEST.size):
        (length,) = REQUEST.unpack(request)
        signal.setitimer(signal.ITIMER_REAL, time_limit_s + ALARM_GRACE_S)
        try:
            pixels = decode(_read(memory, length))
        except InvalidImage as error:
            message = str(error).encode()[:MAX_MESSAGE_BYTES]
            os.write(answers, ANSWER.pack(False, 0, 0, len(message)) + message)
        else:
            _write(memory, pixels)
            os.write(answers, ANSWER.pack(True, pixels.shape[0], pixels.shape[1], 0))
            large = pixels.nbytes > LARGE_BYTES
            del pixels
            if large:
                give_back_memory(0)
        signal.setitimer(signal.ITIMER_REAL, 0.0)


def _read(memory: int, length: int) -> bytes:
    found = os.pread(memory, length, 0)
    if len(found) != length:
        raise OSError(f"the shared memory holds {len(found)} bytes of {length}")
    return found


def _write(memory: int, pixels: np.ndarray) -> None:
    view, at = pixels.data.cast("B"), 0
    while at < len(view):
        at += os.pwrite(memory, view[at:], at)


def limit_process(max_pixels: int) -> None:
    """Bounds this process's memory; no core files."""
    _, allowed = resource.getrlimit(resource.RLIMIT_AS)
    most = MEMORY_BESIDE_PIXELS + BYTES_PER_PIXEL * max_pixels
    if allowed != resource.RLIM_INFINITY:
        most = min(most, allowed)
    resource.setrlimit(resource.RLIMIT_AS, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main(decode: Callable[..., np.ndarray] = decode_image) -> None:
    """Arguments: descriptor, time limit, then limits and policy as `workers.DecodeWorker` writes them."""
    memory, time_limit_s, most_bytes, most_pixels, side, upright, background, truncated, reduced = sys.argv[1:]
    limits = DecodeLimits(int(most_bytes), int(most_pixels), int(side))
    red, green, blue = (int(level) for level in background.split(","))
    policy = DecodePolicy(upright == "1", (red, green, blue), truncated == "1", int(reduced))
    limit_process(limits.max_pixels)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C at a terminal is the parent's business
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGALRM})
    serve(int(memory), float(time_limit_s), partial(decode, limits=limits, policy=policy))


if __name__ == "__main__":
    main()
