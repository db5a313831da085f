"""A 310P: no fused operator and no bfloat16; torch's attention in float16 works."""

import pytest
import torch
import torch.nn.functional as F
import torch_npu

from tests.npu_sim.simulator import Simulator


def test_the_device_says_what_it_is() -> None:
    assert torch_npu.npu.get_device_name(0) == "Ascend310P3"
    assert torch_npu.npu.device_count() == 1


def test_the_fused_operator_is_refused(simulator: Simulator) -> None:
    x = torch.zeros(1, 2, 4, 64, dtype=torch.float16, device="npu:0")
    with pytest.raises(RuntimeError, match="Ascend310P3 is not supported"):
        torch_npu.npu_fused_infer_attention_score(x, x, x, num_heads=2, input_layout="BNSD")
    assert not simulator.calls.fused


def test_bfloat16_is_refused() -> None:
    x = torch.ones(3, dtype=torch.bfloat16).to("npu:0")
    with pytest.raises(RuntimeError, match="bfloat16 is not supported on Ascend310P3"):
        x + 1


def test_float16_attention_works(simulator: Simulator) -> None:
    x = torch.randn(1, 2, 8, 64).half()
    got = F.scaled_dot_product_attention(*[x.to("npu:0")] * 3)
    torch.testing.assert_close(
        got.cpu().float(), F.scaled_dot_product_attention(*[x.float()] * 3), atol=1e-2, rtol=1e-2
    )
    assert len(simulator.calls.sdpa) == 1
