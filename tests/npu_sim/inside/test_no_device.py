"""A host with the torch_npu wheel and no NPU."""

import pytest
import torch
import torch_npu


def test_nothing_is_available() -> None:
    assert torch_npu.npu.device_count() == 0
    assert not torch_npu.npu.is_available()
    with pytest.raises(RuntimeError):
        torch.ones(2).to("npu:0")
    assert (torch.ones(2) + 1).tolist() == [2.0, 2.0]
