"""Which mask needs of a family a pool's attention backend does not take itself."""

from collections.abc import Iterable

from encoder.v1 import encoder_pb2 as pb

# What a call without a mask asks for.
NO_MASK = "none"
# How a replica counts attention calls that its backend did not take for their mask: encoder.attention.dispatch.
REFUSED_COUNTER = "fallback:mask need "
SEPARATOR = "+"


def masks_lacking(needs: Iterable[str], replicas: Iterable[pb.ReplicaReport]) -> frozenset[str]:
    """Of a tower's mask needs, those that some replica does not declare, or was seen to leave to the fallback.

    A pool without a report declares nothing.
    """
    masks = frozenset(needs) - {NO_MASK}
    reports = list(replicas)
    taken = [frozenset(report.backend.mask_needs) - _refused(report) for report in reports]
    return masks - frozenset.intersection(*taken) if taken else masks


def _refused(report: pb.ReplicaReport) -> frozenset[str]:
    return frozenset(
        need
        for counter, calls in report.counters.items()
        if calls and counter.startswith(REFUSED_COUNTER)
        for need in counter.removeprefix(REFUSED_COUNTER).split(SEPARATOR)
    )
