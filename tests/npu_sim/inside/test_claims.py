"""One device of the two that were granted exists: CANN says nothing, so the engine must."""

import pytest

from encoder.device import open_device
from encoder.engine import Engine
from encoder.errors import Unsupported
from encoder.settings import EngineSettings


def test_fewer_devices_than_claimed_is_an_error_at_start() -> None:
    with pytest.raises(Unsupported, match=r"npu device 0 of 2 claimed: this process sees 1 .*visible-devices variable"):
        Engine.load(EngineSettings.model_validate({"device": "npu", "claimed_devices": 2}))


def test_the_missing_device_is_named() -> None:
    with pytest.raises(Unsupported, match=r"npu device 1 of 2 claimed: this process sees 1; .*ASCEND_RT_VISIBLE"):
        open_device("npu", 1, 2)


def test_what_is_there_and_granted_is_reported() -> None:
    device = open_device("npu", 0, 1)
    assert (device.visible_count, device.claimed_count, device.torch_name) == (1, 1, "npu:0")
    assert (device.architecture, device.memory_bytes, device.best_dtype) == ("Ascend910B2", 1 << 30, "bfloat16")
