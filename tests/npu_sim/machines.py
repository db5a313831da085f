"""Which simulated machine a module under ``inside/`` runs on, where that is not the default one."""

from __future__ import annotations

from pathlib import Path

from .settings import SimulatedMachine

DEFAULT_MACHINE = SimulatedMachine()
MACHINES = {
    "test_310p.py": SimulatedMachine(device_name="Ascend310P3", device_count=1),
    "test_engine_on_310p.py": SimulatedMachine(device_name="Ascend310P3", device_count=1),
    "test_claims.py": SimulatedMachine(visible_devices="0,7"),
    "test_real_size.py": SimulatedMachine(device_count=1, memory_bytes=6 << 30, threads=2),
    "test_lost_device.py": SimulatedMachine(visible_devices="0,7"),
    "test_no_device.py": SimulatedMachine(device_count=0),
}


def machine_for(module: str | Path) -> SimulatedMachine:
    """The machine of a module, by its file name."""
    return MACHINES.get(Path(module).name, DEFAULT_MACHINE)
