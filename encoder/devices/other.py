"""Accelerators that torch serves by their own name (xpu, musa) and that need nothing else from this project."""

import torch

from encoder.device import Device
from encoder.errors import Unsupported


def open_device(kind: str, index: int, claimed: int) -> Device:
    """Raises Unsupported when this torch has no such accelerator or sees none."""
    accelerator = getattr(torch, kind, None)
    count = accelerator.device_count() if accelerator is not None and accelerator.is_available() else 0
    if accelerator is None or index >= count:
        raise Unsupported(f"{kind} device {index}: this torch ({torch.__version__}) sees {count} of that kind")
    properties = accelerator.get_device_properties(index)
    name = str(getattr(properties, "name", kind))
    return Device(
        kind=kind,
        index=index,
        name=name,
        architecture=name,
        memory_bytes=int(getattr(properties, "total_memory", 0)),
        visible_count=count,
        claimed_count=claimed,
        best_dtype="bfloat16",
    )
