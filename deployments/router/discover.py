"""Asks a pool what it serves, and how fast it says it is."""

import logging
from collections.abc import Iterable
from typing import TypeVar

import grpc
from google.protobuf.message import DecodeError, Message

from deployments.router.calls import APPLICATION_METADATA, id_metadata, new_request_id
from deployments.router.logs import log_event
from deployments.router.pools import Pool
from encoder.v1 import encoder_pb2 as pb

logger = logging.getLogger(__name__)
AnyMessage = TypeVar("AnyMessage", bound=Message)

TOWER_NAMES = {pb.TOWER_VISION: "vision", pb.TOWER_TEXT: "text"}


class PoolUnfit(Exception):
    """A pool that answers, but not as a pool must."""


async def discover(pool: Pool, timeout_s: float) -> None:
    """Asks the pool for its models, towers, vector sizes and speed, and notes them on it.

    Raises grpc.aio.AioRpcError when it cannot be asked, PoolUnfit when it does not serve what the settings say.
    """
    metadata = ((APPLICATION_METADATA, pool.name), *id_metadata(new_request_id()))
    models = parse(pb.ListModelsResponse, await pool.ask("ListModels", b"", timeout_s, metadata))
    by_tower: dict[str, set[str]] = {}
    dimensions: dict[str, int] = {}
    for model in models.models:
        for served in model.towers:
            tower = TOWER_NAMES.get(served.tower)
            if tower is not None:
                by_tower.setdefault(tower, set()).add(model.name)
                # Two models in one pool: the size to expect depends on its default, so none is expected.
                differs = dimensions.get(tower, served.dimensions) != served.dimensions
                dimensions[tower] = 0 if differs else served.dimensions
    if not by_tower:
        raise PoolUnfit("it lists no model")
    missing = (pool.declared or frozenset()) - by_tower.keys()
    if missing:
        raise PoolUnfit(f"the settings say that it serves {_words(missing)}, but it serves {_words(by_tower)}")
    found = {tower: frozenset(names) for tower, names in by_tower.items()}
    if pool.models != found:
        listed = {tower: sorted(names) for tower, names in found.items()}
        log_event(logger, logging.INFO, "pool_serves", {"pool": pool.name, "models": listed})
    pool.models, pool.dimensions = found, dimensions
    pool.speed.claimed = await _claimed_speed(pool, timeout_s)


async def _claimed_speed(pool: Pool, timeout_s: float) -> float | None:
    """Items per second of all replicas that the pool's report shows; None when it gives no figure."""
    metadata = ((APPLICATION_METADATA, pool.name), *id_metadata(new_request_id()))
    try:
        answer = await pool.ask("GetBackendReport", b"", timeout_s, metadata)
        report = parse(pb.GetBackendReportResponse, answer)
    except (grpc.aio.AioRpcError, PoolUnfit):
        return None  # without a claim the pool's speed is measured all the same
    return sum(replica.items_per_second for replica in report.replicas) or None


def parse(kind: type[AnyMessage], answer: bytes) -> AnyMessage:
    """A pool's answer as a message; raises PoolUnfit."""
    try:
        return kind.FromString(answer)
    except DecodeError:
        raise PoolUnfit(f"its answer is no {kind.__name__}") from None


def _words(towers: Iterable[str]) -> str:
    return " and ".join(sorted(towers))
