"""Which masks a pool's backends take themselves: declared, counted, and what follows for calls."""

import grpc
import pytest

from deployments.router.inventory import read_inventory
from deployments.router.masks import NO_MASK, REFUSED_COUNTER, SEPARATOR, masks_lacking
from encoder.attention.backend import AttentionCall, Capabilities, MaskNeed
from encoder.attention.dispatch import Dispatcher
from encoder.v1 import encoder_pb2 as pb

from .fake_pool import Failure, FakePool
from .harness import eventually, failure_of, fleet, texts

Code = grpc.StatusCode


def report(*masks: str) -> pb.ReplicaReport:
    return pb.ReplicaReport(backend=pb.BackendReport(mask_needs=masks))


def counted(reason: str, calls: int, *masks: str) -> pb.ReplicaReport:
    return pb.ReplicaReport(backend=pb.BackendReport(mask_needs=masks), counters={f"fallback:{reason}": calls})


@pytest.mark.parametrize(
    ("needs", "replicas", "lacking"),
    [
        (["none"], [report()], set()),
        ([], [report()], set()),
        (["causal", "none"], [report("none", "causal")], set()),
        (["causal", "key_padding"], [report("none", "causal")], {"key_padding"}),
        # One replica of several is enough to lack it.
        (["causal"], [report("causal"), report()], {"causal"}),
        # No report: nothing is declared.
        (["causal"], [], {"causal"}),
        (["none"], [], set()),
        # Declared, but seen to fall back.
        (["causal"], [counted("mask need causal", 3, "causal")], {"causal"}),
        (["causal"], [counted("mask need causal", 0, "causal")], set()),
        (["causal", "key_padding"], [counted("mask need causal+key_padding", 1, "causal", "key_padding")],
         {"causal", "key_padding"}),
        # For other reasons than the mask.
        (["causal"], [counted("head_dim 72", 9, "causal")], set()),
    ],
)  # fmt: skip
def test_what_is_lacking(needs: list[str], replicas: list[pb.ReplicaReport], lacking: set[str]) -> None:
    assert masks_lacking(needs, replicas) == lacking


def test_the_names_of_masks_and_counters_are_the_encoders() -> None:
    import torch

    from encoder.attention.resolve import ResolvedBackend

    assert MaskNeed.NONE.value == NO_MASK
    bare = Capabilities(frozenset({MaskNeed.NONE}), frozenset({"float32"}))
    dispatcher = Dispatcher(ResolvedBackend("reference", "server", "for this test", bare, ()))
    dispatcher._backend.capabilities = bare  # a backend that takes no mask
    tensor = torch.zeros(1, 1, 2, 4)
    padded = torch.ones(1, 1, 1, 2, dtype=torch.bool)
    with dispatcher.forward():
        dispatcher.attend(AttentionCall(tensor, tensor, tensor, 1.0, padded, is_causal=True))
    (counter,) = (name for name, calls in dispatcher.counters().items() if name != "fused" and calls)
    assert counter.startswith(REFUSED_COUNTER)
    needs = set(counter.removeprefix(REFUSED_COUNTER).split(SEPARATOR))
    assert needs == {MaskNeed.CAUSAL.value, MaskNeed.KEY_PADDING.value}


def test_a_towers_masks_are_held_against_its_own_replicas() -> None:
    model = pb.Model(
        name="clip",
        towers=[
            pb.ServedTower(tower=pb.TOWER_VISION, mask_needs=["additive"]),
            pb.ServedTower(tower=pb.TOWER_TEXT, mask_needs=["causal"]),
        ],
    )
    replicas = [
        pb.ReplicaReport(tower=pb.TOWER_VISION, backend=pb.BackendReport(mask_needs=["causal"])),
        pb.ReplicaReport(tower=pb.TOWER_TEXT, backend=pb.BackendReport(mask_needs=["causal"])),
    ]
    assert read_inventory([model], replicas).lacks == {"vision": {"additive"}, "text": set()}


MASKS = ("causal", "key_padding")


async def test_texts_go_to_the_pool_whose_backend_takes_their_masks() -> None:
    # The one that lacks a mask is faster, and comes first.
    lacking = FakePool("text-npu", tower="text", mask_needs=MASKS, backend_masks=("causal",), items_per_second=1000)
    taking = FakePool("text-cpu", tower="text", mask_needs=MASKS, backend_masks=MASKS, latency_s=0.01)
    async with fleet(lacking, taking) as started:
        for _ in range(5):
            answer = await started.stub.EncodeText(texts("x"), timeout=10)
            assert answer.provenance.pool == "text-cpu"
        # Asked for by name it is used, with its fallback.
        answer = await started.stub.EncodeText(texts("x", pool="text-npu"), timeout=10)
        assert answer.provenance.pool == "text-npu"
        started.state("text-cpu").healthy = False
        answer = await started.stub.EncodeText(texts("x"), timeout=10)
        assert answer.provenance.pool == "text-npu"


async def test_required_masks_refuse_what_would_fall_back() -> None:
    lacking = FakePool("text-npu", tower="text", mask_needs=MASKS, backend_masks=("causal",))
    async with fleet(lacking, masks="require") as started:
        for pool in ("", "text-npu"):
            error = await failure_of(started.stub.EncodeText(texts("x", pool=pool), timeout=10))
            assert error.code() is Code.FAILED_PRECONDITION
            assert "text-npu lacks key_padding" in error.details()
    assert not lacking.requests
    taking = FakePool("text-cpu", tower="text", mask_needs=MASKS, backend_masks=MASKS)
    async with fleet(FakePool("text-npu", tower="text", mask_needs=MASKS), taking, masks="require") as started:
        answer = await started.stub.EncodeText(texts("x"), timeout=10)
        assert answer.provenance.pool == "text-cpu"


async def test_a_pool_that_cannot_report_for_a_moment_keeps_what_it_declared() -> None:
    pool = FakePool("text", tower="text", mask_needs=MASKS, backend_masks=MASKS)
    async with fleet(pool, masks="require", health={"refresh_s": 0.05, "interval_s": 0.05}) as started:
        pool.report_failure = Failure(Code.INTERNAL, "busy")
        before = pool.reports
        await eventually(lambda: pool.reports >= before + 3)
        await started.stub.EncodeText(texts("x"), timeout=10)
