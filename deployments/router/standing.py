"""How the router sees its pools, as the fleet's report tells it."""

import time
from collections.abc import Sequence

from deployments.router.pools import Pool
from deployments.router.quarantine import Quarantine
from encoder.v1 import encoder_pb2 as pb

_TOWERS = {"vision": pb.TOWER_VISION, "text": pb.TOWER_TEXT}


def pool_status(pool: Pool) -> pb.PoolStatus:
    """The reasons, if there are several, stand in the order of their weight."""
    inventory = pool.inventory
    models = sorted({name for names in inventory.models.values() for name in names}) if inventory else []
    reasons = [
        pool.reason if not pool.healthy else "",
        pool.quarantine,
        pool.ejection.reason if pool.ejection.is_out(time.monotonic()) else "",
    ]
    return pb.PoolStatus(
        pool=pool.name,
        healthy=pool.healthy,
        quarantined=bool(pool.quarantine),
        reason="; ".join(filter(None, reasons)),
        in_flight=pool.speed.in_flight,
        items_per_second=pool.speed.items_per_second() or 0.0,
        fingerprint=" ".join(sorted(inventory.fingerprints)) if inventory else "",
        model=" ".join(models),
        revision=" ".join(inventory.revisions) if inventory else "",
    )


def agreement_rows(quarantine: Quarantine, pools: Sequence[Pool]) -> list[pb.Agreement]:
    """The measured agreement between pools; of those that concern one of `pools`."""
    names = {pool.name for pool in pools}
    return [
        pb.Agreement(pool_a=one, pool_b=other, tower=_TOWERS[tower], worst_cosine=cosine)
        for tower, one, other, cosine in quarantine.rows()
        if one in names or other in names
    ]
