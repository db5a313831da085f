"""The fused operator's reference: values against torch's fp32 attention, every refusal, every misbehaviour, the log."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch_npu

from tests.npu_sim.simulator import Misbehaviour, Simulator

BATCH, TOKENS, HEADS, DIM = 2, 24, 4, 64
CLOSE = {"atol": 1e-2, "rtol": 1e-2}


def fused(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    """The operator on npu:0 with CPU tensors in and out; heads default to HEADS, the scale to DIM**-0.5."""
    options = {"num_heads": HEADS, "scale": DIM**-0.5, **options}
    mask = options.get("atten_mask")
    if mask is not None:
        options["atten_mask"] = mask.to("npu:0")
    there = (x.to("npu:0") for x in (query, key, value))
    return torch_npu.npu_fused_infer_attention_score(*there, **options)[0].cpu()


def oracle(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    """torch's attention in fp32 on (batch, heads, tokens, dim)."""
    return F.scaled_dot_product_attention(query.float(), key.float(), value.float(), **options)


def random_bnsd(heads: int = HEADS, tokens: int = TOKENS, dim: int = DIM, batch: int = BATCH) -> torch.Tensor:
    return torch.randn(batch, heads, tokens, dim).bfloat16()


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


def to_layout(x: torch.Tensor, layout: str) -> torch.Tensor:
    """(B, N, S, D) into another layout; TND joins the batch."""
    if layout.startswith("BNSD"):
        return x
    bsnd = x.transpose(1, 2).contiguous()
    return {"BSND": bsnd, "BSH": bsnd.flatten(2), "TND": bsnd.flatten(0, 1)}[layout]


@pytest.mark.parametrize("layout", ["BNSD", "BSND", "BSH", "TND"])
@pytest.mark.parametrize("kv_heads", [HEADS, 2, 1])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_layouts_and_grouped_heads(layout: str, kv_heads: int, dtype: torch.dtype) -> None:
    q, k, v = (random_bnsd(n).to(dtype) for n in (HEADS, kv_heads, kv_heads))
    ends = {"actual_seq_lengths": [TOKENS, 2 * TOKENS], "actual_seq_lengths_kv": [TOKENS, 2 * TOKENS]}
    got = fused(
        *(to_layout(x, layout) for x in (q, k, v)),
        input_layout=layout,
        num_key_value_heads=kv_heads,
        **(ends if layout == "TND" else {}),
    )
    expected = to_layout(oracle(q, k, v, enable_gqa=True), layout)
    assert got.dtype == dtype
    torch.testing.assert_close(got.float(), expected, **CLOSE)


def test_bnsd_bsnd_turns_the_output_around() -> None:
    q, k, v = random_bnsd(), random_bnsd(), random_bnsd()
    got = fused(q, k, v, input_layout="BNSD_BSND")
    torch.testing.assert_close(got.float(), oracle(q, k, v).transpose(1, 2), **CLOSE)


def test_the_scale_is_the_callers() -> None:
    q, k, v = random_bnsd(), random_bnsd(), random_bnsd()
    got = fused(q, k, v, input_layout="BNSD", scale=0.5)
    torch.testing.assert_close(got.float(), oracle(q, k, v, scale=0.5), **CLOSE)


def test_tnd_keeps_sequences_apart() -> None:
    x = random_bnsd(batch=1)
    got = fused(*[to_layout(x, "TND")] * 3, input_layout="TND", actual_seq_lengths=[5, 5, TOKENS],
                actual_seq_lengths_kv=[5, 5, TOKENS])  # fmt: skip
    parts = [oracle(*[x[:, :, a:b]] * 3) for a, b in ((0, 5), (5, TOKENS))]
    torch.testing.assert_close(got.float(), torch.cat(parts, 2)[0].transpose(0, 1), **CLOSE)


def test_lengths_cut_keys_and_queries() -> None:
    q, k, v = random_bnsd(), random_bnsd(), random_bnsd()
    got = fused(q, k, v, input_layout="BNSD", actual_seq_lengths=[TOKENS, 7], actual_seq_lengths_kv=[10, 7])
    torch.testing.assert_close(got[:1].float(), oracle(q[:1], k[:1, :, :10], v[:1, :, :10]), **CLOSE)
    torch.testing.assert_close(got[1:, :, :7].float(), oracle(q[1:, :, :7], k[1:, :, :7], v[1:, :, :7]), **CLOSE)
    assert torch.count_nonzero(got[1, :, 7:]) == 0


@pytest.mark.parametrize("dtype", [torch.bool, torch.int8, torch.uint8])
@pytest.mark.parametrize("shape", ["S,S", "1,S,S", "1,1,S,S", "B,1,S,S"])
def test_a_mask_hides_where_it_is_true(shape: str, dtype: torch.dtype) -> None:
    q, k, v = random_bnsd(), random_bnsd(), random_bnsd()
    sizes = [{"S": TOKENS, "B": BATCH}.get(part) or int(part) for part in shape.split(",")]
    hidden = torch.rand(sizes) < 0.5
    hidden[..., 0] = False
    got = fused(q, k, v, input_layout="BNSD", atten_mask=hidden.to(dtype))
    torch.testing.assert_close(got.float(), oracle(q, k, v, attn_mask=~hidden), **CLOSE)


def test_a_mask_for_one_query_is_per_batch_entry() -> None:
    q, k, v = random_bnsd(tokens=1), random_bnsd(), random_bnsd()
    hidden = torch.arange(TOKENS) >= torch.tensor([[5], [9]])
    got = fused(q, k, v, input_layout="BNSD", atten_mask=hidden)
    torch.testing.assert_close(got.float(), oracle(q, k, v, attn_mask=~hidden[:, None, None]), **CLOSE)


def test_fully_masked_rows() -> None:
    q, k, v = random_bnsd(), random_bnsd(), random_bnsd()
    hidden = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)
    hidden[3] = True
    got = fused(q, k, v, input_layout="BNSD", atten_mask=hidden)
    torch.testing.assert_close(got[:, :, 3].float(), v.float().mean(2), **CLOSE)
    corrected = fused(q, k, v, input_layout="BNSD", atten_mask=hidden, inner_precise=2)
    assert torch.count_nonzero(corrected[:, :, 3]) == 0
    torch.testing.assert_close(corrected[:, :, 4:], got[:, :, 4:])


COMPRESSED = torch.ones(2048, 2048, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("sparse_mode", [2, 3])
@pytest.mark.parametrize("queries", [TOKENS, TOKENS - 6])
def test_compressed_causal_masks(sparse_mode: int, queries: int) -> None:
    q, k, v = random_bnsd(tokens=queries), random_bnsd(), random_bnsd()
    got = fused(q, k, v, input_layout="BNSD", atten_mask=COMPRESSED, sparse_mode=sparse_mode)
    corner = 0 if sparse_mode == 2 else TOKENS - queries
    seen = torch.ones(queries, TOKENS, dtype=torch.bool).tril(corner)
    torch.testing.assert_close(got.float(), oracle(q, k, v, attn_mask=seen), **CLOSE)


def test_band_mask() -> None:
    q, k, v = random_bnsd(), random_bnsd(), random_bnsd()
    got = fused(q, k, v, input_layout="BNSD", atten_mask=COMPRESSED, sparse_mode=4, pre_tokens=3, next_tokens=1)
    seen = torch.ones(TOKENS, TOKENS, dtype=torch.bool).tril(1).triu(-3)
    torch.testing.assert_close(got.float(), oracle(q, k, v, attn_mask=seen), **CLOSE)


def test_causal_tnd_with_the_compressed_mask() -> None:
    x = random_bnsd(batch=1)
    got = fused(*[to_layout(x, "TND")] * 3, input_layout="TND", atten_mask=COMPRESSED, sparse_mode=3,
                actual_seq_lengths=[9, TOKENS], actual_seq_lengths_kv=[9, TOKENS])  # fmt: skip
    parts = [oracle(*[x[:, :, a:b]] * 3, is_causal=True) for a, b in ((0, 9), (9, TOKENS))]
    torch.testing.assert_close(got.float(), torch.cat(parts, 2)[0].transpose(0, 1), **CLOSE)


GOOD = random_bnsd(batch=1)
TND = to_layout(GOOD, "TND")
LENGTHS = {"actual_seq_lengths": [TOKENS], "actual_seq_lengths_kv": [TOKENS]}
SQUARE = torch.zeros(TOKENS, TOKENS, dtype=torch.bool)


def _wide(dim: int, heads: int = HEADS) -> tuple[torch.Tensor]:
    return (torch.zeros(1, heads, 4, dim, dtype=torch.bfloat16),) * 3


REFUSALS: dict[str, tuple[tuple[torch.Tensor, ...], dict[str, Any], str]] = {
    "float32": ((GOOD.float(),) * 3, {}, "float16 or bfloat16"),
    "mixed dtypes": ((GOOD, GOOD.half(), GOOD.half()), {}, "key is torch.float16 but query is torch.bfloat16"),
    "key and value shapes": ((GOOD, GOOD, GOOD[:, :, :-1].contiguous()), {}, "must have one shape"),
    "batches": ((GOOD, *[random_bnsd()] * 2), {}, "batch of query 1 and of key 2"),
    "unknown layout": ((GOOD,) * 3, {"input_layout": "SBH"}, "not supported, choose from"),
    "rank": ((GOOD,) * 3, {"input_layout": "BSH"}, "wants 3 dimensions"),
    "head count": ((GOOD,) * 3, {"num_heads": 2}, "query has 4 heads, num_heads is 2"),
    "kv head count": ((GOOD,) * 3, {"num_key_value_heads": 2}, "key has 4 heads, num_key_value_heads is 2"),
    "head ratio": ((GOOD, GOOD[:, :3].contiguous(), GOOD[:, :3].contiguous()), {"num_key_value_heads": 3}, "multiple"),
    "too many heads": (_wide(16, 257), {"num_heads": 257}, "1..256"),
    "head_dim 72": (_wide(72), {}, "multiple of 16, got 72"),
    "head_dim 528": (_wide(528), {}, "at most 512, got 528"),
    "wide BSH": ((torch.zeros(1, 2, 256 * 256, dtype=torch.bfloat16),) * 3,
                 {"input_layout": "BSH", "num_heads": 256}, "N\\*D must be below 65535"),
    "TND head_dim 80": ((torch.zeros(TOKENS, HEADS, 80, dtype=torch.bfloat16),) * 3,
                        {"input_layout": "TND", **LENGTHS}, "must be one of \\(64, 128, 192\\), got 80"),
    "TND without lengths": ((TND,) * 3, {"input_layout": "TND"}, "TND needs actual_seq_lengths"),
    "TND one kind of length": ((TND,) * 3, {"input_layout": "TND", "actual_seq_lengths": [TOKENS]}, "lengths_kv"),
    "TND short end": ((TND,) * 3, {"input_layout": "TND", **LENGTHS, "actual_seq_lengths": [23]}, "T\\(24\\) must"),
    "TND per-sequence lengths": ((TND,) * 3, {"input_layout": "TND", **LENGTHS, "actual_seq_lengths": [14, 10]},
                                 "must be cumulative"),
    "TND length counts": ((TND,) * 3, {"input_layout": "TND", **LENGTHS, "actual_seq_lengths": [4, TOKENS]},
                          "2 query and 1 key sequences"),
    "TND mask": ((TND,) * 3, {"input_layout": "TND", **LENGTHS, "atten_mask": SQUARE}, "sparse_mode 3 or 4 alone"),
    "TND sparse 2": ((TND,) * 3, {"input_layout": "TND", **LENGTHS, "atten_mask": COMPRESSED, "sparse_mode": 2},
                     "TND does not take sparse_mode 2"),
    "TND more queries": ((TND, TND[:8], TND[:8]), {"input_layout": "TND", "atten_mask": COMPRESSED, "sparse_mode": 3,
                         "actual_seq_lengths": [TOKENS], "actual_seq_lengths_kv": [8]}, "more queries than keys"),
    "length count": ((random_bnsd(batch=3),) * 3, {"actual_seq_lengths_kv": [3, 4]}, "has 2 entries, 1 or 3"),
    "length too long": ((GOOD,) * 3, {"actual_seq_lengths_kv": [TOKENS + 1]}, "must be in 0..24"),
    "float mask": ((GOOD,) * 3, {"atten_mask": SQUARE.bfloat16()}, "bool, int8 or uint8"),
    "mask broadcast over queries": ((GOOD,) * 3, {"atten_mask": SQUARE[:1][None, None]}, "must be one of"),
    "mask per head": ((GOOD,) * 3, {"atten_mask": SQUARE.expand(1, HEADS, -1, -1).contiguous()}, "must be one of"),
    "sparse mode 5": ((GOOD,) * 3, {"sparse_mode": 5}, "must be in 0..4"),
    "sparse mode 3 without mask": ((GOOD,) * 3, {"sparse_mode": 3}, "needs an atten_mask"),
    "small compressed mask": ((GOOD,) * 3, {"sparse_mode": 3, "atten_mask": SQUARE}, "2048, 2048"),
    "inverted compressed mask": ((GOOD,) * 3, {"sparse_mode": 3, "atten_mask": ~COMPRESSED}, "above the diagonal"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSALS)
def test_a_call_outside_the_contract_is_refused(case: str) -> None:
    tensors, options, reason = REFUSALS[case]
    with pytest.raises(RuntimeError, match=f"error code is 561002: .*{reason}"):
        fused(*tensors, **{"input_layout": "BNSD", **options})


def test_strided_inputs_are_refused() -> None:
    x = GOOD.to("npu:0")
    strided = x.transpose(1, 2).contiguous().transpose(1, 2)
    mask = torch.zeros(TOKENS, 2 * TOKENS, dtype=torch.bool, device="npu:0")[:, ::2]
    options = {"num_heads": HEADS, "input_layout": "BNSD"}
    for tensors in ((strided, x, x), (x, strided, x), (x, x, strided)):
        with pytest.raises(RuntimeError, match="must be contiguous"):
            torch_npu.npu_fused_infer_attention_score(*tensors, **options)
    with pytest.raises(RuntimeError, match="atten_mask must be contiguous"):
        torch_npu.npu_fused_infer_attention_score(x, x, x, atten_mask=mask, **options)


def test_arguments_that_the_wheel_does_not_know_are_refused() -> None:
    x = GOOD.to("npu:0")
    with pytest.raises(RuntimeError, match="Unknown keyword argument 'nheads'"):
        torch_npu.npu_fused_infer_attention_score(x, x, x, nheads=HEADS)
    with pytest.raises(RuntimeError, match="takes 3 positional argument"):
        torch_npu.npu_fused_infer_attention_score(x, x, x, None, num_heads=HEADS)


def test_what_the_reference_does_not_cover_is_said() -> None:
    with pytest.raises(NotImplementedError, match="not simulated with softmax_lse_flag"):
        fused(GOOD, GOOD, GOOD, input_layout="BNSD", softmax_lse_flag=True)
    with pytest.raises(NotImplementedError, match="not simulated with pse_shift"):
        fused(GOOD, GOOD, GOOD, input_layout="BNSD", pse_shift=torch.zeros(1, 4, 24, 24).bfloat16().to("npu:0"))


def tnd_call() -> torch.Tensor:
    return fused(TND, TND, TND, input_layout="TND", **LENGTHS)


def test_uniform_average_strikes_tnd_without_a_mask_alone(simulator: Simulator) -> None:
    healthy = tnd_call()
    with simulator.misbehaving(Misbehaviour.UNIFORM_AVERAGE):
        sick = tnd_call()
        other_layout = fused(GOOD, GOOD, GOOD, input_layout="BNSD")
    torch.testing.assert_close(sick.float(), TND.float().mean(0, keepdim=True).expand_as(sick), **CLOSE)
    assert (sick.float() - healthy.float()).abs().max() > 0.5
    torch.testing.assert_close(to_layout(other_layout, "TND"), healthy)
    assert torch.equal(tnd_call(), healthy)


def test_mask_ignored_past_512(simulator: Simulator) -> None:
    q, k, v = (random_bnsd(tokens=n, batch=1) for n in (1, 520, 520))
    hidden = torch.arange(520)[None, None, None] >= 514
    early = torch.arange(520)[None, None, None] < 100
    with simulator.misbehaving(Misbehaviour.MASK_IGNORED_PAST_512):
        sick = fused(q, k, v, input_layout="BNSD", atten_mask=hidden)
        same = fused(q, k, v, input_layout="BNSD", atten_mask=early)
    torch.testing.assert_close(sick.float(), oracle(q, k, v), **CLOSE)
    torch.testing.assert_close(same.float(), oracle(q, k, v, attn_mask=~early), **CLOSE)
    right = fused(q, k, v, input_layout="BNSD", atten_mask=hidden)
    torch.testing.assert_close(right.float(), oracle(q, k, v, attn_mask=~hidden), **CLOSE)
    assert not torch.equal(sick, right)


def test_nan_output(simulator: Simulator) -> None:
    with simulator.misbehaving(Misbehaviour.NAN_OUTPUT):
        assert tnd_call().isnan().all()
    assert not tnd_call().isnan().any()


def test_old_cann_takes_head_dim_192_alone(simulator: Simulator) -> None:
    wide = torch.zeros(TOKENS, HEADS, 192, dtype=torch.bfloat16)
    with simulator.misbehaving(Misbehaviour.OLD_CANN):
        with pytest.raises(RuntimeError, match="must be one of \\(192,\\), got 64"):
            tnd_call()
        fused(wide, wide, wide, input_layout="TND", **LENGTHS)
        fused(GOOD, GOOD, GOOD, input_layout="BNSD")


def test_a_fault_that_begins_later_reaches_replays(simulator: Simulator) -> None:
    x = TND.to("npu:0")
    graph = torch_npu.npu.NPUGraph()
    with torch_npu.npu.graph(graph):
        out = torch_npu.npu_fused_infer_attention_score(x, x, x, num_heads=HEADS, input_layout="TND", **LENGTHS)[0]
    with simulator.misbehaving(Misbehaviour.NAN_OUTPUT):
        graph.replay()
        assert out.cpu().isnan().all()
    graph.replay()
    assert not out.cpu().isnan().any()


def test_the_log_tells_what_reached_which_operator(simulator: Simulator) -> None:
    hidden = torch.zeros(1, 1, TOKENS, TOKENS, dtype=torch.bool)
    fused(GOOD, GOOD, GOOD, input_layout="BNSD", atten_mask=hidden)
    tnd_call()
    (masked, plain) = simulator.calls.fused
    assert (masked.layout, masked.mask_shape, masked.mask_dtype) == ("BNSD", (1, 1, TOKENS, TOKENS), torch.bool)
    assert (plain.layout, plain.lengths, plain.lengths_kv, plain.mask_shape) == ("TND", (TOKENS,), (TOKENS,), None)
    assert (plain.phase, plain.query_shape, plain.device) == ("eager", (TOKENS, HEADS, DIM), 0)
    assert (plain.num_heads, plain.num_key_value_heads, plain.sparse_mode) == (HEADS, HEADS, 0)
    assert plain.scale == pytest.approx(DIM**-0.5)
    with pytest.raises(RuntimeError):
        fused(*REFUSALS["float32"][0], input_layout="BNSD")
    assert len(simulator.calls.fused) == 2
    x = GOOD.to("npu:0")
    F.scaled_dot_product_attention(x, x, x, attn_mask=torch.zeros(TOKENS, TOKENS, dtype=x.dtype, device="npu:0"))
    F.scaled_dot_product_attention(x, x, x, is_causal=True)
    additive, causal = simulator.calls.sdpa
    assert (additive.float_mask, additive.is_causal, additive.mask_shape) == (True, False, (TOKENS, TOKENS))
    assert (causal.float_mask, causal.is_causal, causal.mask_shape) == (False, True, None)
    assert len(simulator.calls.fused) == 2
