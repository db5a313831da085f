"""torch_npu's own NPUGraph on the simulated runtime: capture, replay, update, and what goes wrong."""

import gc
import threading
from collections.abc import Callable

import pytest
import torch
import torch_npu
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack

from tests.npu_sim.simulator import Counter, Simulator

HEADS, HEAD_DIM, TOKENS = 2, 64, 20


def capture(work: Callable[[], torch.Tensor], **options: object) -> tuple[torch_npu.npu.NPUGraph, torch.Tensor]:
    graph = torch_npu.npu.NPUGraph()
    with torch_npu.npu.graph(graph, **options):
        out = work()
    return graph, out


def attention(x: torch.Tensor, ends: list[int]) -> torch.Tensor:
    out: torch.Tensor = torch_npu.npu_fused_infer_attention_score(
        x, x, x,
        actual_seq_lengths=ends, actual_seq_lengths_kv=ends,
        num_heads=HEADS, num_key_value_heads=HEADS, scale=HEAD_DIM**-0.5, input_layout="TND", sparse_mode=0,
    )[0]  # fmt: skip
    return out


def expected_attention(x: torch.Tensor, ends: list[int]) -> torch.Tensor:
    """By torch's own attention in fp32 on the CPU, a segment at a time."""
    parts = []
    for start, end in zip([0, *ends[:-1]], ends, strict=True):
        part = x[start:end].float().transpose(0, 1)
        parts.append(torch.nn.functional.scaled_dot_product_attention(part, part, part).transpose(0, 1))
    return torch.cat(parts)


def test_replay_reads_the_input_buffer_and_writes_the_same_output(simulator: Simulator) -> None:
    buffer = torch.arange(4.0).to("npu:0")
    before = [simulator.runtime.counter(c) for c in (Counter.CAPTURES, Counter.REPLAYS)]
    graph, out = capture(lambda: (buffer * 2 + 1).view(2, 2).t() @ torch.eye(2, device="npu:0"))
    address = out.data_ptr()
    for start in (0.0, 10.0):
        values = torch.arange(start, start + 4)
        buffer.copy_(values)
        graph.replay()
        assert torch.equal(out.cpu(), (values * 2 + 1).view(2, 2).t())
    assert out.data_ptr() == address
    after = [simulator.runtime.counter(c) for c in (Counter.CAPTURES, Counter.REPLAYS)]
    assert [b - a for a, b in zip(before, after, strict=True)] == [1, 2]


def test_capturing_runs_nothing() -> None:
    counter = torch.zeros(1, device="npu:0")
    graph, out = capture(lambda: counter.add_(1) * 10)
    assert counter.item() == 0.0
    assert out.cpu().isnan().all()
    graph.replay()
    graph.replay()
    assert counter.item() == 2.0
    assert out.item() == 20.0


def test_a_value_read_on_the_host_is_baked_into_the_graph() -> None:
    x = torch.ones(3, device="npu:0")
    factor = 2.0
    graph, out = capture(lambda: x * factor)
    factor = 5.0
    graph.replay()
    assert out.cpu().tolist() == [2.0] * 3


def test_a_freed_buffer_under_a_graph_gives_wrong_values() -> None:
    """The graph knows an address. Once the allocator gives the bytes away, a replay reads what the new owner wrote."""
    work_space = [torch.full((1000,), 3.0, device="npu:0")]
    graph, out = capture(lambda: work_space[0] + 1)
    graph.replay()
    assert out.cpu().unique().tolist() == [4.0]
    address = work_space[0].data_ptr()
    work_space.clear()
    newcomer = torch.full((1000,), 8.0, device="npu:0")
    assert newcomer.data_ptr() == address
    graph.replay()
    assert out.cpu().unique().tolist() == [9.0]


def test_memory_given_back_to_the_device_is_poison() -> None:
    big = [torch.ones(8 << 20, dtype=torch.float32, device="npu:0")]
    graph, out = capture(lambda: big[0][:10] + 1)
    graph.replay()
    assert out.cpu().tolist() == [2.0] * 10
    big.clear()
    torch_npu.npu.empty_cache()
    graph.replay()
    assert out.cpu().isnan().all()


def test_an_output_that_was_dropped_is_overwritten_in_a_shared_pool() -> None:
    pool = torch_npu.npu.graph_pool_handle()
    x = torch.ones(1000, device="npu:0")
    first, out_first = capture(lambda: x + 1, pool=pool)
    alias = torch_npu._C._weak_ref_tensor(out_first)
    del out_first
    second, out_second = capture(lambda: x + 2, pool=pool)
    first.replay()
    assert alias.cpu().unique().tolist() == [2.0]
    second.replay()
    assert out_second.cpu().unique().tolist() == [3.0]
    assert alias.cpu().unique().tolist() == [3.0]


def test_lengths_stay_as_captured_without_auto_dispatch() -> None:
    torch.manual_seed(0)
    x = torch.randn(TOKENS, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    ends = [8, TOKENS]
    buffer = x.to("npu:0")
    graph, out = capture(lambda: attention(buffer, ends))
    ends[0] = 13
    graph.replay()
    torch.testing.assert_close(out.cpu().float(), expected_attention(x, [8, TOKENS]), atol=2e-2, rtol=2e-2)
    with pytest.raises(RuntimeError, match="auto_dispatch_capture"):
        graph.update(cpu_update_input=[{"actual_seq_lengths": ends, "actual_seq_lengths_kv": ends}])


def test_update_then_replay_takes_the_new_lengths(simulator: Simulator) -> None:
    torch.manual_seed(0)
    x = torch.randn(TOKENS, HEADS, HEAD_DIM, dtype=torch.bfloat16)
    buffer = torch.zeros_like(x, device="npu:0")
    graph, out = capture(lambda: attention(attention(buffer, [8, TOKENS]), [8, TOKENS]), auto_dispatch_capture=True)
    buffer.copy_(x)
    for ends in ([8, TOKENS], [13, TOKENS], [5, 9, TOKENS]):
        graph.update(cpu_update_input=[{"actual_seq_lengths": ends, "actual_seq_lengths_kv": ends}])
        graph.replay()
        expected = expected_attention(expected_attention(x, ends).bfloat16(), ends)
        torch.testing.assert_close(out.cpu().float(), expected, atol=2e-2, rtol=2e-2)
    assert [call.phase for call in simulator.calls.fused] == ["capture"] * 2 + [
        "update",
        "update",
        "replay",
        "replay",
    ] * 3
    assert simulator.calls.fused[-1].lengths == (5, 9, TOKENS)


def test_replay_without_update_would_wait_for_ever() -> None:
    x = torch.zeros(TOKENS, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="npu:0")
    graph, _ = capture(lambda: attention(x, [TOKENS]), auto_dispatch_capture=True)
    with pytest.raises(RuntimeError, match="update\\(\\) must come before each replay"):
        graph.replay()
    graph.update(cpu_update_input=[{"actual_seq_lengths": [TOKENS], "actual_seq_lengths_kv": [TOKENS]}])
    graph.replay()
    with pytest.raises(RuntimeError, match="update\\(\\) must come before each replay"):
        graph.replay()


def test_an_update_that_breaks_the_contract_is_refused() -> None:
    x = torch.zeros(TOKENS, HEADS, HEAD_DIM, dtype=torch.bfloat16, device="npu:0")
    graph, _ = capture(lambda: attention(x, [TOKENS]), auto_dispatch_capture=True)
    with pytest.raises(RuntimeError, match="T\\(20\\) must equal the last element"):
        graph.update(cpu_update_input=[{"actual_seq_lengths": [8, 19], "actual_seq_lengths_kv": [8, 19]}])


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x.cpu(),
        lambda x: x.sum().item(),
        lambda x: x[x > 0],
        lambda x: torch.nonzero(x),
        lambda x: x.copy_(torch.ones(3)),
        lambda x: torch.tensor([1.0, 2.0, 3.0], device=x.device) + x,
        lambda x: torch_npu.npu.synchronize(),
    ],
    ids=["cpu", "item", "bool_index", "nonzero", "host_copy", "torch_tensor", "synchronize"],
)
def test_a_call_that_waits_for_the_device_spoils_a_capture(read: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(3, device="npu:0")
    with pytest.raises(RuntimeError, match="the capture is invalid") as caught:
        capture(lambda: read(x))
    assert "captured" in str(caught.value.__context__)
    assert not torch_npu.npu.is_current_stream_capturing()


def test_a_capture_that_failed_leaves_its_stream_and_its_mode_behind() -> None:
    """So does torch_npu 2.13 by its own code, as the end of an invalid capture raises before it puts them back."""
    x = torch.ones(3, device="npu:0")
    with pytest.raises(RuntimeError, match="the capture is invalid"):
        capture(lambda: x.cpu(), auto_dispatch_capture=True)
    assert torch_npu.npu.current_stream() != torch_npu.npu.default_stream()
    assert len(_get_current_dispatch_mode_stack()) == 1


def test_an_asynchronous_copy_from_pinned_memory_is_captured() -> None:
    host = torch.tensor([1.0, 2.0]).pin_memory()
    x = torch.zeros(2, device="npu:0")
    graph, out = capture(lambda: x.copy_(host, non_blocking=True) * 10)
    host.copy_(torch.tensor([3.0, 4.0]))
    graph.replay()
    assert out.cpu().tolist() == [30.0, 40.0]


def test_another_thread_may_not_wait_while_a_global_capture_runs() -> None:
    x = torch.ones(3, device="npu:0")
    seen: list[BaseException] = []

    def other() -> None:
        try:
            torch_npu.npu.synchronize()
        except RuntimeError as problem:
            seen.append(problem)

    def work(**options: str) -> None:
        def with_thread() -> torch.Tensor:
            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            return x + 1

        graph, out = capture(with_thread, **options)
        graph.replay()
        assert out.cpu().tolist() == [2.0] * 3

    with pytest.raises(RuntimeError, match="the capture is invalid"):
        work()
    assert len(seen) == 1
    torch_npu.npu.set_stream(torch_npu.npu.default_stream())
    work(capture_error_mode="relaxed")
    assert len(seen) == 1


def test_out_of_memory_at_capture(simulator: Simulator) -> None:
    x = torch.ones(1 << 20, device="npu:0")  # 4 MiB
    with simulator.memory_headroom(16 << 20), pytest.raises(torch.OutOfMemoryError):
        capture(lambda: torch.cat([x] * 16))
    graph, out = capture(lambda: torch.cat([x] * 16))
    graph.replay()
    assert out.sum().item() == 16 << 20


def test_streams_run_out_at_capture(simulator: Simulator) -> None:
    x = torch.ones(3, device="npu:0")
    kept = [capture(lambda: x + 1)]
    gc.collect()  # graphs of earlier tests give their streams back
    live = simulator.runtime.live_streams(0)
    with simulator.stream_headroom(2):
        kept += [capture(lambda: x + 1) for _ in range(2)]
        with pytest.raises(RuntimeError, match="207008"):
            capture(lambda: x + 1)
    assert simulator.runtime.live_streams(0) == live + 2
    kept.clear()
    gc.collect()
    assert simulator.runtime.live_streams(0) == live - 1


def test_two_devices_have_their_own_memory_and_graphs(simulator: Simulator) -> None:
    outs = []
    for device in (0, 1):
        torch_npu.npu.set_device(device)
        x = torch.full((1000,), float(device + 1), device=f"npu:{device}")
        other = simulator.runtime.used_memory(1 - device)
        stream = torch_npu.npu.Stream(device=device)  # torch_npu's default capture stream belongs to one device
        graph, out = capture(lambda x=x: x * 10, stream=stream)
        assert simulator.runtime.used_memory(1 - device) <= other  # capturing empties every cache
        graph.replay()
        outs.append(out)
    assert [(o.device.index, o[0].item()) for o in outs] == [(0, 10.0), (1, 20.0)]
    moved = outs[1].to("npu:0")
    assert (moved + outs[0]).unique().tolist() == [30.0]
    with pytest.raises(RuntimeError, match="same device"):
        outs[0] + outs[1]


def test_side_streams_join_a_capture() -> None:
    x = torch.ones(3, device="npu:0")
    side = torch_npu.npu.Stream()

    def work() -> torch.Tensor:
        main = torch_npu.npu.current_stream()
        side.wait_stream(main)
        with torch_npu.npu.stream(side):
            y = x + 1
        main.wait_stream(side)
        return y * 2

    graph, out = capture(work)
    x.fill_(4.0)
    graph.replay()
    assert out.cpu().tolist() == [10.0] * 3


def test_a_graph_can_be_reset_and_captured_again() -> None:
    x = torch.ones(3, device="npu:0")
    graph, out = capture(lambda: x + 1)
    graph.reset()
    with torch_npu.npu.graph(graph):
        out = x + 2
    graph.replay()
    assert out.cpu().tolist() == [3.0] * 3


def test_an_error_in_a_replayed_operator_is_raised() -> None:
    table, ids = torch.ones(4, 2, device="npu:0"), torch.zeros(1, dtype=torch.long, device="npu:0")
    graph, out = capture(lambda: torch.nn.functional.embedding(ids, table))
    graph.replay()
    assert out.cpu().tolist() == [[1.0, 1.0]]
    ids.fill_(99)
    with pytest.raises(RuntimeError, match="IndexError: index out of range"):
        graph.replay()
