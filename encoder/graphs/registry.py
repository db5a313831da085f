"""Names of the graph runners and where they live; to add one: one file and one line here."""

from importlib import import_module

from encoder.device import Device
from encoder.errors import Unsupported
from encoder.graphs.runner import GraphRunner

RUNNERS: dict[str, str] = {
    "eager": "encoder.graphs.eager:EagerRunner",
    "openvino": "encoder.graphs.openvino:OpenVinoRunner",
    "cuda": "encoder.graphs.cuda:CudaGraphRunner",
    "npu": "encoder.graphs.npu:NpuGraphRunner",
    "inductor": "encoder.graphs.inductor:InductorRunner",
    "cuda-inductor": "encoder.graphs.inductor:CompiledCudaGraphRunner",
}
PLATFORM_RUNNERS: dict[str, tuple[str, ...]] = {
    "cpu": ("openvino",),
    "cuda": ("cuda",),
    "rocm": ("cuda",),
    "npu": ("npu",),
}


def runner_class(name: str) -> type[GraphRunner]:
    """The class behind a runner's name; raises Unsupported for a name that is not known."""
    target = RUNNERS.get(name)
    if target is None:
        raise Unsupported(f"graph runner {name!r} is unknown: use auto or one of {', '.join(sorted(RUNNERS))}")
    module, _, attribute = target.partition(":")
    found: type[GraphRunner] = getattr(import_module(module), attribute)
    return found


def choose_runner(setting: str, device: Device) -> tuple[type[GraphRunner], tuple[str, ...]]:
    """The runner for a device, and notes about those that could not be had.

    A runner that is asked for by name and cannot run here raises Unsupported; with 'auto' the platform's are tried in
    order, then eager.
    """
    if setting != "auto":
        asked = runner_class(setting)
        why_not = asked.unavailable(device)
        if why_not is not None:
            raise Unsupported(
                f"graph runner {setting!r} cannot run on {device.describe()}: {why_not}; use auto, or another one"
            )
        return asked, ()
    notes: list[str] = []
    for name in PLATFORM_RUNNERS.get(device.kind, ()):
        candidate = runner_class(name)
        why_not = candidate.unavailable(device)
        if why_not is None:
            return candidate, tuple(notes)
        notes.append(f"graph runner {name} is not used: {why_not}")
    return runner_class("eager"), tuple(notes)
