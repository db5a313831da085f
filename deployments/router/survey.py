"""Asks a pool what it serves, with which replicas, and how fast it says it is."""

import logging
from collections.abc import Iterable
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from deployments.router.calls import APPLICATION_METADATA, id_metadata, new_request_id
from deployments.router.inventory import read_inventory
from deployments.router.logs import log_event
from deployments.router.pools import Pool
from encoder.v1 import encoder_pb2 as pb

logger = logging.getLogger(__name__)
AnyMessage = TypeVar("AnyMessage", bound=Message)


class PoolUnfit(Exception):
    """A pool that answers, but not as a pool must."""


async def take_inventory(pool: Pool, timeout_s: float) -> None:
    """Asks the pool for its models and its report, and notes them on it.

    Raises grpc.aio.AioRpcError when it cannot be asked, PoolUnfit when it does not serve what the settings say.
    """
    metadata = ((APPLICATION_METADATA, pool.name), *id_metadata(new_request_id()))
    listed = parse(pb.ListModelsResponse, await pool.ask("ListModels", b"", timeout_s, metadata))
    pool.reports = await _reports(pool, timeout_s)
    inventory = read_inventory(listed.models, pool.reports)
    if not inventory.models:
        raise PoolUnfit("it lists no model")
    missing = (pool.declared or frozenset()) - inventory.models.keys()
    if missing:
        served = _words(inventory.models)
        raise PoolUnfit(f"the settings say that it serves {_words(missing)}, but it serves {served}")
    if pool.models != inventory.models:
        names = {tower: sorted(models) for tower, models in inventory.models.items()}
        log_event(logger, logging.INFO, "pool_serves", {"pool": pool.name, "models": names})
    pool.inventory = inventory
    pool.speed.claimed = inventory.items_per_second


def parse(kind: type[AnyMessage], answer: bytes) -> AnyMessage:
    """A pool's answer as a message; raises PoolUnfit."""
    try:
        return kind.FromString(answer)
    except DecodeError:
        raise PoolUnfit(f"its answer is no {kind.__name__}") from None


async def _reports(pool: Pool, timeout_s: float) -> tuple[pb.ReplicaReport, ...]:
    """Of its replicas; what they said last when it cannot tell now, since it serves all the same."""
    metadata = ((APPLICATION_METADATA, pool.name), *id_metadata(new_request_id()))
    try:
        answer = await pool.ask("GetBackendReport", b"", timeout_s, metadata)
        return tuple(parse(pb.GetBackendReportResponse, answer).replicas)
    except (grpc.aio.AioRpcError, PoolUnfit):
        return pool.reports


def _words(towers: Iterable[str]) -> str:
    return " and ".join(sorted(towers))
