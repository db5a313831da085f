"""How a device is shared out: forwards that run side by side, each on a lane of its own.

A lone item still has the whole device, by the smallest bucket's graph; all else goes through a lane.
"""

from collections.abc import Sequence
from dataclasses import replace

from encoder.errors import Unsupported
from encoder.graphs.runner import Bucket, GraphRunner


def check_lanes(runner: type[GraphRunner], lanes: int, threads: int, *, packed: bool) -> None:
    """Raises Unsupported when the runner has no lanes, or there are more of them than threads.

    Nor are there any for `packed` batches: no runner that has lanes takes these, so that all would run eager, in turns.
    """
    if lanes > 1 and not runner.has_lanes:
        raise Unsupported(f"lanes are for OpenVINO, and this engine runs with {runner.name}: leave lanes out, or say 1")
    if lanes > 1 and packed:
        raise Unsupported(
            "lanes are for pictures of one size and for texts, and this model packs pictures of any: "
            "leave lanes out, or say 1"
        )
    if lanes > threads:
        raise Unsupported(f"{lanes} lanes cannot share {threads} threads: use fewer lanes, or more threads")


def with_lanes(buckets: Sequence[Bucket], lanes: int) -> list[Bucket]:
    """The smallest batch for the whole device, and each size shared out among the lanes."""
    if lanes == 1:
        return list(buckets)
    smallest = min(bucket.batch for bucket in buckets)
    whole = [bucket for bucket in buckets if bucket.batch == smallest]
    shares = {replace(bucket, batch=-(-bucket.batch // lanes), lanes=lanes) for bucket in buckets}
    return whole + sorted(shares)
