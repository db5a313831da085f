"""Which device an engine runs on. The kind comes from the settings and is checked, never guessed from what is visible.

A CPU replica on an NPU node sees every NPU (Ray clears no variable for it), so visibility proves nothing.
"""

import re
from dataclasses import dataclass
from importlib import import_module

from encoder.errors import Unsupported

# kind: the module whose `open_device(kind, index, claimed)` knows it; to add one: one file and one line here
DEVICES: dict[str, str] = {
    "cpu": "encoder.devices.cpu",
    "cuda": "encoder.devices.cuda",
    "rocm": "encoder.devices.cuda",
    "npu": "encoder.devices.npu",
    "xpu": "encoder.devices.other",
    "musa": "encoder.devices.other",
}


@dataclass(frozen=True)
class Device:
    """One device: `kind` cpu, cuda, npu, ...; `architecture` as its maker writes it, e.g. 'sm_90', 'Ascend910B2'.

    `memory_bytes`: of the device. `visible_count` against `claimed_count`: what this process sees and was granted.
    `toolkit`: version of CUDA, CANN, ... `best_dtype`: numeric type of a forward when the settings leave it open.
    """

    kind: str
    index: int
    name: str
    architecture: str
    memory_bytes: int
    driver: str = ""
    toolkit: str = ""
    visible_count: int = 1
    claimed_count: int = 1
    best_dtype: str = "float32"

    @property
    def torch_name(self) -> str:
        """The name torch takes: 'cpu', 'npu:0'; ROCm goes by the name cuda."""
        if self.kind == "cpu":
            return "cpu"
        return f"{'cuda' if self.kind == 'rocm' else self.kind}:{self.index}"

    def describe(self) -> str:
        """For people: 'cpu (AMD EPYC, x86_64 avx512_bf16)'."""
        return f"{self.torch_name} ({self.name}, {self.architecture})"


def open_device(kind: str, index: int = 0, claimed: int = 1) -> Device:
    """The device of that kind and index, of which the caller was granted `claimed`.

    Raises Unsupported when it is not there, or when fewer are visible than were granted.
    """
    module = DEVICES.get(kind)
    if module is None:
        raise Unsupported(f"device kind {kind!r} is unknown: use one of {', '.join(DEVICES)}")
    device: Device = import_module(module).open_device(kind, index, claimed)
    if device.visible_count < max(claimed, index + 1):
        raise Unsupported(
            f"{kind} device {index} of {claimed} claimed: this process sees {device.visible_count} "
            f"({device.name}); check the replica's resources and the visible-devices variable"
        )
    return device


def compute_capability(device: Device) -> tuple[int, int]:
    """(9, 0) of architecture 'sm_90', (10, 3) of 'sm_103'; (0, 0) where there is none."""
    found = re.fullmatch(r"sm_(\d+)(\d)[a-z]?", device.architecture)
    return (int(found[1]), int(found[2])) if found else (0, 0)
