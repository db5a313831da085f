"""Huawei Ascend NPUs through torch_npu, which is imported here and in the npu files of attention and graphs alone."""

from encoder.device import Device
from encoder.errors import Unsupported


def open_device(kind: str, index: int, claimed: int) -> Device:
    """Raises Unsupported when torch_npu is missing or its runtime sees no such device."""
    try:
        import torch_npu
    except (ImportError, OSError, RuntimeError) as error:  # of a missing library, or of CANN's own start
        first_line = (str(error).splitlines() or [type(error).__name__])[0]
        raise Unsupported(
            f"device kind 'npu': torch_npu cannot be imported ({first_line}): install it and CANN"
        ) from None
    import torch

    npu = torch.npu  # type: ignore[attr-defined]
    count = npu.device_count()
    if index >= count:
        raise Unsupported(
            f"npu device {index} of {claimed} claimed: this process sees {count}; check the replica's resources and "
            "ASCEND_RT_VISIBLE_DEVICES, from which ids that do not exist vanish without a word"
        )
    name = str(npu.get_device_name(index))
    return Device(
        kind=kind,
        index=index,
        name=name,
        architecture=name,
        memory_bytes=int(npu.get_device_properties(index).total_memory),
        toolkit=str(getattr(torch_npu.version, "cann", "") or ""),
        visible_count=count,
        claimed_count=claimed,
        best_dtype="float16" if "310" in name else "bfloat16",
    )
