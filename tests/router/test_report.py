"""ListModels, GetModel and GetBackendReport over several pools."""

import grpc
import pytest

from deployments.router.report import merge_models
from encoder.v1 import encoder_pb2 as pb

from .fake_pool import Failure, FakePool
from .harness import NOWHERE, failure_of, fleet

Code = grpc.StatusCode


def tower(pools: list[str], fingerprint: str = "f1", kind: int = pb.TOWER_VISION) -> pb.ServedTower:
    return pb.ServedTower(tower=kind, dimensions=8, pools=pools, fingerprint=fingerprint)


def test_models_are_merged_by_name_and_revision_and_towers_by_all_but_their_pools() -> None:
    listed = [
        ("a", pb.Model(name="clip", revision="r1", family="clip", towers=[tower(["x"])])),
        ("b", pb.Model(name="clip", revision="r1", family="clip", towers=[tower([])])),
        ("c", pb.Model(name="clip", revision="r1", family="clip", towers=[tower(["c"], "f2")])),
        ("d", pb.Model(name="clip", revision="r1", family="clip", towers=[tower(["d"], "f1", pb.TOWER_TEXT)])),
        ("e", pb.Model(name="clip", revision="r2", family="clip", towers=[tower(["e"])])),
        ("f", pb.Model(name="siglip", revision="r1", family="siglip", towers=[tower(["f"])])),
    ]
    assert merge_models(listed) == [
        pb.Model(
            name="clip",
            revision="r1",
            family="clip",
            towers=[tower(["a", "b"]), tower(["c"], "f2"), tower(["d"], "f1", pb.TOWER_TEXT)],
        ),
        pb.Model(name="clip", revision="r2", family="clip", towers=[tower(["e"])]),
        pb.Model(name="siglip", revision="r1", family="siglip", towers=[tower(["f"])]),
    ]
    # What the pools sent is left as it was.
    assert listed[0][1].towers[0].pools == ["x"]


async def test_list_models_joins_the_pools_that_answer() -> None:
    pools = [FakePool("vision-a"), FakePool("vision-b"), FakePool("text", tower="text")]
    extra = [{"name": "vision-gone", "address": NOWHERE}]
    async with fleet(*pools, extra=extra) as started:
        answer = await started.stub.ListModels(pb.ListModelsRequest(), timeout=10)
        assert [model.name for model in answer.models] == ["clip"]
        assert [list(served.pools) for served in answer.models[0].towers] == [["vision-a", "vision-b"], ["text"]]
        for pool in pools:
            pool.unlisted = Failure(Code.UNAVAILABLE, "draining")
        error = await failure_of(started.stub.ListModels(pb.ListModelsRequest(), timeout=10))
    assert error.code() is Code.UNAVAILABLE
    assert "vision-gone" in error.details()
    assert NOWHERE not in error.details()


async def test_get_model() -> None:
    pools = [FakePool("vision-a"), FakePool("text", tower="text")]
    async with fleet(*pools) as started:
        for name in ("", "clip"):
            model = (await started.stub.GetModel(pb.GetModelRequest(model=name), timeout=10)).model
            assert model.name == "clip"
            assert {served.tower for served in model.towers} == {pb.TOWER_VISION, pb.TOWER_TEXT}
        error = await failure_of(started.stub.GetModel(pb.GetModelRequest(model="dino"), timeout=10))
        assert error.code() is Code.NOT_FOUND
        assert "clip" in error.details()
        # A pool that does not answer may have it.
        pools[0].unlisted = Failure(Code.UNAVAILABLE)
        error = await failure_of(started.stub.GetModel(pb.GetModelRequest(model="dino"), timeout=10))
        assert error.code() is Code.UNAVAILABLE


@pytest.mark.parametrize("default_model", ["", "siglip"])
async def test_get_model_without_a_name_where_there_are_several(default_model: str) -> None:
    pools = [FakePool("vision-a"), FakePool("vision-b", model="siglip")]
    async with fleet(*pools, default_model=default_model) as started:
        call = started.stub.GetModel(pb.GetModelRequest(), timeout=10)
        if default_model:
            assert (await call).model.name == "siglip"
        else:
            error = await failure_of(call)
            assert error.code() is Code.FAILED_PRECONDITION
            assert "clip, siglip" in error.details()


async def test_the_report_joins_replicas_and_names_pools_that_cannot_be_asked() -> None:
    pools = [FakePool("vision-a", replicas=2, items_per_second=50.0), FakePool("text", tower="text")]
    hung = FakePool("vision-hung")
    extra = [{"name": "vision-gone", "address": NOWHERE}]
    async with fleet(*pools, hung, extra=extra, deadline={"report_s": 1.0}) as started:
        hung.unlisted = Failure(
            Code.INTERNAL, 'Traceback (most recent call last):\n  File "/x/y.py", line 1\nOSError: z'
        )
        report = await started.stub.GetBackendReport(pb.GetBackendReportRequest(), timeout=10)
        assert [(replica.pool, replica.replica) for replica in report.replicas] == [
            ("vision-a", "vision-a-0"),
            ("vision-a", "vision-a-1"),
            ("text", "text-0"),
        ]
        unreachable = {missing.pool: missing.error for missing in report.unreachable}
        assert unreachable.keys() == {"vision-gone", "vision-hung"}
        assert unreachable["vision-gone"].code == Code.UNAVAILABLE.value[0]
        assert NOWHERE not in unreachable["vision-gone"].message
        assert unreachable["vision-hung"].code == Code.INTERNAL.value[0]
        assert unreachable["vision-hung"].message == "pool 'vision-hung' failed: OSError"

        report = await started.stub.GetBackendReport(pb.GetBackendReportRequest(pool="text"), timeout=10)
        assert [replica.pool for replica in report.replicas] == ["text"]
        assert not report.unreachable
        error = await failure_of(started.stub.GetBackendReport(pb.GetBackendReportRequest(pool="x"), timeout=10))
        assert error.code() is Code.NOT_FOUND
        # What the replicas say of their speed is where the router's own measurement begins.
        assert started.state("vision-a").speed.claimed == 100.0
        assert started.state("text").speed.claimed is None


async def test_requests_that_are_no_messages_are_refused() -> None:
    async with fleet(FakePool("vision-a")) as started:
        for method in ("ListModels", "GetModel", "GetBackendReport"):
            call = started.channel.unary_unary(f"/encoder.v1.EncoderService/{method}")(b"\x0a\x7f", timeout=10)
            assert (await failure_of(call)).code() is Code.INVALID_ARGUMENT
        unknown = started.channel.unary_unary("/encoder.v1.EncoderService/Other")(b"", timeout=10)
        assert (await failure_of(unknown)).code() is Code.UNIMPLEMENTED
