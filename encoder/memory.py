"""What is done with memory: it is given back to the system, and searched for what can be freed, when it is time.

The C allocator keeps what is freed, and pages of files that were read once stay; Python looks for cycles by itself.
"""

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def trim() -> None:
    """Blocks for some 10 to 100 ms; does nothing where the C library is not glibc. Any thread.

    glibc keeps the pieces of freed 40 MB requests in its arenas: measured 1014 MB resident before, 594 MB after.
    """
    if not sys.platform.startswith("linux"):
        return
    malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if malloc_trim is not None:
        malloc_trim(ctypes.c_size_t(0))


# glibc, malloc.h
M_MMAP_THRESHOLD, M_ARENA_MAX = -3, -8
ARENAS = 2
# A decoded picture of 640x480 is 0.9 MB: what is larger than half of it goes back to the system when it is freed.
MMAP_THRESHOLD = 512 * 1024


def keep_little() -> None:
    """Has the C allocator of this process keep little of what is freed; called once, early. glibc only, else nothing.

    By itself it makes an arena for each thread, and raises the size from which it gives memory back to 32 MB.
    """
    if not sys.platform.startswith("linux"):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_ARENA_MAX, ARENAS)
        mallopt(M_MMAP_THRESHOLD, MMAP_THRESHOLD)


# Objects made before the youngest are looked through, and how often those before them: Python's are 700, 10, 10.
SELDOM = (50_000, 20, 100)


@contextmanager
def searching_seldom() -> Iterator[None]:
    """Inside, Python seldom looks for cycles to free: while modules are imported, nearly all objects stay.

    Measured with torch and transformers: 3.5 s instead of 4.4 s, and 411 000 objects in the end instead of 392 000.
    """
    usual = gc.get_threshold()
    gc.set_threshold(*SELDOM)
    try:
        yield
    finally:
        gc.set_threshold(*usual)


MADV_DONTNEED = 4  # Linux, linux/mman.h


def drop_mapped_pages(path: Path) -> None:
    """Lets go of a mapped file's pages; whoever reads them again gets them from the file. Linux only, else nothing.

    OpenVINO maps the weights and, once it has packed them its own way, reads them no more, but they stay resident.
    """
    if not sys.platform.startswith("linux"):
        return
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    for line in Path("/proc/self/maps").read_text().splitlines():
        fields = line.split(maxsplit=5)
        # A private mapping that may be written could hold pages of its own.
        if len(fields) == 6 and fields[5] == str(path) and "w" not in fields[1]:
            start, end = (int(address, 16) for address in fields[0].split("-"))
            madvise(start, end - start, MADV_DONTNEED)
