"""Which simulated machine a module under ``inside/`` runs on, where not on the default one, and in which company."""

from __future__ import annotations

from collections.abc import Iterable
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

# They leave streams in the middle of a capture or of an update, which torch hands out again; the runner's counts what
# memory and streams are left, too.
ALONE = frozenset({"test_graphs.py", "test_npu_runner.py"})


def machine_for(module: str | Path) -> SimulatedMachine:
    """The machine of a module, by its file name."""
    return MACHINES.get(Path(module).name, DEFAULT_MACHINE)


def companies(modules: Iterable[str]) -> list[list[str]]:
    """The modules, by file name, that share a process: those of one machine, as a start costs more than most do."""
    shared: dict[tuple[SimulatedMachine, str], list[str]] = {}
    for module in modules:
        shared.setdefault((machine_for(module), module if module in ALONE else ""), []).append(module)
    return list(shared.values())
