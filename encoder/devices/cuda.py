"""NVIDIA GPUs, and AMD ones under ROCm, which torch calls cuda as well."""

import torch

from encoder.device import Device
from encoder.errors import Unsupported


def open_device(kind: str, index: int, claimed: int) -> Device:
    """Raises Unsupported when torch was built for something else, or sees no device."""
    toolkit = torch.version.hip if kind == "rocm" else torch.version.cuda
    if toolkit is None:
        raise Unsupported(f"device kind {kind!r}: this torch ({torch.__version__}) was built without it")
    count = torch.cuda.device_count()
    if index >= count:
        raise Unsupported(
            f"{kind} device {index}: this process sees {count}; check the driver and CUDA_VISIBLE_DEVICES"
        )
    properties = torch.cuda.get_device_properties(index)
    capability = f"sm_{properties.major}{properties.minor}"
    return Device(
        kind=kind,
        index=index,
        name=properties.name,
        architecture=getattr(properties, "gcnArchName", capability) if kind == "rocm" else capability,
        memory_bytes=properties.total_memory,
        driver=_driver(),
        toolkit=toolkit,
        visible_count=count,
        claimed_count=claimed,
        best_dtype="bfloat16" if kind == "rocm" or properties.major >= 8 else "float16",
    )


def _driver() -> str:
    """The driver's version, where nvidia-ml-py is installed (extra `cuda`)."""
    try:
        import pynvml
    except ImportError:
        return ""
    try:
        pynvml.nvmlInit()
        version: str = pynvml.nvmlSystemGetDriverVersion()
        pynvml.nvmlShutdown()
    except pynvml.NVMLError:
        return ""
    return version
