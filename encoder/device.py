"""Which device an engine runs on. The kind comes from the settings and is checked, never guessed from what is visible.

A CPU replica on an NPU node sees every NPU (Ray clears no variable for it), so visibility proves nothing.
"""

import platform
from dataclasses import dataclass
from pathlib import Path

import psutil

from encoder.errors import Unsupported


@dataclass(frozen=True)
class Device:
    """One device: `kind` cpu, cuda, npu, ...; `architecture` as its maker writes it, e.g. 'sm_90', 'Ascend910B2'.

    `memory_bytes`: of the device. `visible_count` against `claimed_count`: what this process sees and was granted.
    """

    kind: str
    index: int
    name: str
    architecture: str
    memory_bytes: int
    driver: str = ""
    visible_count: int = 1
    claimed_count: int = 1
    features: frozenset[str] = frozenset()

    @property
    def torch_name(self) -> str:
        """The name torch takes: 'cpu', 'npu:0'."""
        return "cpu" if self.kind == "cpu" else f"{self.kind}:{self.index}"

    def describe(self) -> str:
        """For people: 'cpu (AMD EPYC …, x86_64 avx512_bf16)'."""
        return f"{self.torch_name} ({self.name}, {self.architecture})"

    def best_dtype(self) -> str:
        """The numeric type a forward uses here when the settings leave it open."""
        if self.kind == "cpu":
            return "bfloat16" if self.features & {"avx512_bf16", "amx_bf16", "bf16"} else "float32"
        if self.kind == "cuda":
            return "bfloat16" if "bf16" in self.features else "float16"
        if self.kind == "npu":
            return "float16" if "310" in self.architecture else "bfloat16"
        return "float32"


def open_device(kind: str, index: int = 0, claimed: int = 1) -> Device:
    """The device of that kind and index; raises Unsupported when it is not there, naming what is."""
    if kind == "cpu":
        return _cpu(claimed)
    raise Unsupported(f"device kind {kind!r} is unknown: use cpu, cuda or npu")


def _cpu(claimed: int) -> Device:
    name, flags = platform.processor() or platform.machine(), set[str]()
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            field, _, value = line.partition(":")
            if field.strip() == "model name":
                name = value.strip()
            elif field.strip() in ("flags", "Features"):
                flags = set(value.split())
                break
    notable = [flag for flag in ("avx2", "avx512f", "avx512_bf16", "amx_bf16", "amx_int8", "bf16") if flag in flags]
    return Device(
        kind="cpu",
        index=0,
        name=name,
        architecture=" ".join([platform.machine(), *notable[-2:]]),
        memory_bytes=psutil.virtual_memory().total,
        visible_count=psutil.cpu_count(logical=True) or 1,
        claimed_count=claimed,
        features=frozenset(flags),
    )
