"""ASCEND_RT_VISIBLE_DEVICES names devices 0 and 7 on a host with two: one device is there, and nobody is told."""

import pytest
import torch
import torch_npu


def test_only_the_devices_that_exist_count() -> None:
    assert torch_npu.npu.is_available()
    assert torch_npu.npu.device_count() == 1


def test_the_missing_device_cannot_be_used() -> None:
    assert torch.ones(2).to("npu:0").cpu().tolist() == [1.0, 1.0]
    with pytest.raises(RuntimeError, match=r"(?i)invalid device|device"):
        torch.ones(2).to("npu:1")
