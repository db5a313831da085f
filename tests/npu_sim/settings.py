"""What a simulated machine looks like, and how those choices travel into its process."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

MIB = 1 << 20


class Misbehaviour(StrEnum):
    """Ways in which the fused attention operator can be wrong in silence, or refuse what newer versions accept."""

    UNIFORM_AVERAGE = "uniform_average"
    """TND without a mask returns the mean of the values (reported publicly from a 910B4)."""
    MASK_IGNORED_PAST_512 = "mask_ignored_past_512"
    """A mask has no effect on key positions from 512 on (reported publicly)."""
    NAN_OUTPUT = "nan_output"
    """Every output is NaN."""
    OLD_CANN = "old_cann"
    """TND accepts head_dim 192 alone, as older CANN does (reported publicly)."""


@dataclass(frozen=True)
class SimulatedMachine:
    """One simulated host with its NPUs. A process has one machine for its whole life.

    ``device_name`` is what the runtime reports (``Ascend910B2``, ``Ascend310P3``, …); ``memory_bytes`` is per device.
    ``visible_devices`` is the text of ``ASCEND_RT_VISIBLE_DEVICES``; ids that do not exist vanish without a word, as on
    a real host. ``stream_limit`` counts streams a device. Threads are kept low so that tests can run side by side.
    """

    device_name: str = "Ascend910B2"
    device_count: int = 2
    memory_bytes: int = 1024 * MIB
    stream_limit: int = 2048
    visible_devices: str | None = None
    misbehave: Misbehaviour | None = None
    threads: int = 1

    def environment(self, base: Mapping[str, str]) -> dict[str, str]:
        """``base`` with this machine's variables; a visible-devices variable of the outer host never leaks in."""
        env = {name: value for name, value in base.items() if name != "ASCEND_RT_VISIBLE_DEVICES"}
        env["NPU_SIM_DEVICE_NAME"] = self.device_name
        env["NPU_SIM_DEVICE_COUNT"] = str(self.device_count)
        env["NPU_SIM_MEMORY_BYTES"] = str(self.memory_bytes)
        env["NPU_SIM_STREAM_LIMIT"] = str(self.stream_limit)
        env["NPU_SIM_MISBEHAVE"] = self.misbehave.value if self.misbehave else ""
        env["OMP_NUM_THREADS"] = str(self.threads)
        if self.visible_devices is not None:
            env["ASCEND_RT_VISIBLE_DEVICES"] = self.visible_devices
        return env


def initial_misbehaviour(env: Mapping[str, str] = os.environ) -> Misbehaviour | None:
    """The misbehaviour that the launcher chose for this process, or None."""
    name = env.get("NPU_SIM_MISBEHAVE", "")
    return Misbehaviour(name) if name else None
