"""The CPU; its numeric type is bfloat16 where the processor multiplies in it, else float32."""

import math
import os
import platform
from pathlib import Path

import psutil

from encoder.device import Device

NOTABLE = ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "asimd", "sve", "bf16")
MULTIPLIES_BF16 = {"avx512_bf16", "amx_bf16", "bf16"}


def open_device(kind: str, index: int, claimed: int) -> Device:
    """Always there; claimed CPUs are time slices, not devices, so one is visible and one is claimed."""
    name, flags = _processor()
    notable = [flag for flag in NOTABLE if flag in flags]
    return Device(
        kind=kind,
        index=0,
        name=name,
        architecture=" ".join([platform.machine(), *notable[-2:]]),
        memory_bytes=psutil.virtual_memory().total,
        best_dtype="bfloat16" if flags & MULTIPLIES_BF16 else "float32",
    )


def usable_processors(cgroup: Path = Path("/sys/fs/cgroup")) -> int:
    """How many this process may keep busy: those it is tied to, and a container's limit, rounded up.

    The limit is that of version 2 or 1 of Linux' control groups; elsewhere there is none.
    """
    tied = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    limit = _limit(cgroup)
    return tied if limit is None else max(1, min(tied, math.ceil(limit)))


def _limit(cgroup: Path) -> float | None:
    """Processor seconds a second; 'max 100000' and -1 say that there is no limit."""
    for files in (("cpu.max",), ("cpu/cpu.cfs_quota_us", "cpu/cpu.cfs_period_us")):
        try:
            words = [word for file in files for word in (cgroup / file).read_text().split()]
            quota, period = map(int, words)
        except (OSError, ValueError):
            continue
        if quota > 0 and period > 0:
            return quota / period
    return None


def _processor() -> tuple[str, set[str]]:
    name, flags = platform.processor() or platform.machine(), set[str]()
    cpuinfo = Path("/proc/cpuinfo")
    if not cpuinfo.exists():
        return name, flags
    for line in cpuinfo.read_text().splitlines():
        field, _, value = line.partition(":")
        if field.strip() == "model name":
            name = value.strip()
        elif field.strip() in ("flags", "Features"):
            return name, set(value.split())
    return name, flags
