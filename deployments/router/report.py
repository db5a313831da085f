"""ListModels, GetModel and GetBackendReport: every pool is asked, and the answers are joined.

Pools are named as the router knows them, since that is what `options.pool` takes.
"""

import asyncio
from collections.abc import Sequence

import grpc
from google.protobuf.message import DecodeError

from deployments.router.calls import Call
from deployments.router.failures import RouterError, deadline_passed, read_failure
from deployments.router.pools import Pool, PoolSet
from deployments.router.quarantine import Quarantine
from deployments.router.settings import RouterSettings
from deployments.router.standing import agreement_rows, pool_status
from deployments.router.survey import AnyMessage, PoolUnfit, parse
from encoder.v1 import encoder_pb2 as pb

_Code = grpc.StatusCode


class Reporter:
    """Answers for the whole fleet."""

    def __init__(self, pools: PoolSet, quarantine: Quarantine, settings: RouterSettings) -> None:
        self._pools = pools
        self._quarantine = quarantine
        self._settings = settings

    async def list_models(self, request: bytes, call: Call) -> bytes:
        """All models of the pools that answer; UNAVAILABLE when none does."""
        _read(pb.ListModelsRequest, request)
        models, failures = await self._models(call)
        if failures and not models:
            raise RouterError(_Code.UNAVAILABLE, f"no pool could be asked for its models: {_told(failures)}")
        return pb.ListModelsResponse(models=models).SerializeToString()

    async def get_model(self, request: bytes, call: Call) -> bytes:
        """One model; without a name the default one, or the only one."""
        name = _read(pb.GetModelRequest, request).model or self._settings.default_model
        models, failures = await self._models(call)
        names = sorted({model.name for model in models})
        if not name and len(names) > 1:
            raise RouterError(_Code.FAILED_PRECONDITION, f"several models are served ({', '.join(names)}): name one")
        # Of several revisions, as during an update, the one of the first pool; ListModels shows them all.
        found = next((model for model in models if not name or model.name == name), None)
        if found is not None:
            return pb.GetModelResponse(model=found).SerializeToString()
        if failures:
            sought = f"model {name!r} was" if name else "a model was"
            raise RouterError(_Code.UNAVAILABLE, f"{sought} not found, but not every pool answers: {_told(failures)}")
        raise RouterError(
            _Code.NOT_FOUND, f"model {name!r} is not served: choose one of {', '.join(names) or '(none)'}"
        )

    async def get_backend_report(self, request: bytes, call: Call) -> bytes:
        """The replicas of all pools, or of the one that is asked for, and how the router sees these pools.

        Pools that do not answer are named with why.
        """
        wanted = _read(pb.GetBackendReportRequest, request).pool
        pools: Sequence[Pool] = self._pools.all
        if wanted:
            pools = [pool for pool in pools if pool.name == wanted]
            if not pools:
                names = ", ".join(self._pools.by_name) or "(none)"
                raise RouterError(_Code.NOT_FOUND, f"there is no pool {wanted!r}: choose one of {names}, or none")
        response = pb.GetBackendReportResponse(
            pools=map(pool_status, pools), agreement=agreement_rows(self._quarantine, pools)
        )
        answers = await asyncio.gather(
            *(self._ask(pool, "GetBackendReport", pb.GetBackendReportResponse, call) for pool in pools)
        )
        for pool, answer in zip(pools, answers, strict=True):
            if isinstance(answer, RouterError):
                response.unreachable.add(pool=pool.name, error=answer.status())
                continue
            for replica in answer.replicas:
                replica.pool = pool.name
            response.replicas.extend(answer.replicas)
        return response.SerializeToString()

    async def _models(self, call: Call) -> tuple[list[pb.Model], dict[str, RouterError]]:
        pools = self._pools.all
        answers = await asyncio.gather(*(self._ask(pool, "ListModels", pb.ListModelsResponse, call) for pool in pools))
        listed: list[tuple[str, pb.Model]] = []
        failures: dict[str, RouterError] = {}
        for pool, answer in zip(pools, answers, strict=True):
            if isinstance(answer, RouterError):
                failures[pool.name] = answer
            else:
                listed.extend((pool.name, model) for model in answer.models)
        return merge_models(listed), failures

    async def _ask(self, pool: Pool, method: str, kind: type[AnyMessage], call: Call) -> AnyMessage | RouterError:
        try:
            timeout_s = min(call.remaining_s(), self._settings.deadline.report_s)
            answer = await pool.ask(method, b"", timeout_s, call.metadata_for(pool.name, timeout_s))
            return parse(kind, answer)
        except grpc.aio.AioRpcError as error:
            if error.code() is _Code.DEADLINE_EXCEEDED:
                return deadline_passed(pool.name)
            return read_failure(error, pool.name, pool.address).error
        except PoolUnfit as error:
            return RouterError(_Code.INTERNAL, f"pool {pool.name!r} failed: {error}")
        except RouterError as error:
            return error


def merge_models(listed: Sequence[tuple[str, pb.Model]]) -> list[pb.Model]:
    """Joins what each pool lists: one Model for each name and revision, one ServedTower for each way it is served.

    Towers that differ in nothing but their pools are one, which names all of these pools.
    """
    models: dict[tuple[str, str], pb.Model] = {}
    towers: dict[tuple[str, str, bytes], pb.ServedTower] = {}
    for pool, model in listed:
        merged = models.get((model.name, model.revision))
        if merged is None:
            merged = pb.Model(name=model.name, revision=model.revision, family=model.family)
            models[model.name, model.revision] = merged
        for tower in model.towers:
            bare = pb.ServedTower()
            bare.CopyFrom(tower)
            bare.ClearField("pools")
            key = (model.name, model.revision, bare.SerializeToString(deterministic=True))
            if key not in towers:
                merged.towers.append(bare)
                towers[key] = merged.towers[-1]
            if pool not in towers[key].pools:
                towers[key].pools.append(pool)
    return list(models.values())


def _read(kind: type[AnyMessage], request: bytes) -> AnyMessage:
    try:
        return kind.FromString(request)
    except DecodeError:
        raise RouterError(_Code.INVALID_ARGUMENT, f"the request cannot be parsed as {kind.__name__}") from None


def _told(failures: dict[str, RouterError]) -> str:
    return "; ".join(failure.message for failure in failures.values())
