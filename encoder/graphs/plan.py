"""Which of the items that wait go to the device together: by the times that the buckets were measured to take.

A bucket of eight for five items computes three for nothing; whether four and one are quicker is a matter of the device:
on a CPU they are, on a GPU the bucket of eight is. So the start's own measurements decide, but for one thing: a bucket
that took longer than smaller ones in its place was disturbed, as a start in a fleet often is, so it never counts more.
"""

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from math import inf

from encoder.graphs.runner import Bucket, GraphRecord


class BatchPlan:
    """Made of what is known of the buckets, where there are lanes of a lane's.

    Packed batches are taken as they come; their forward splits them.
    """

    def __init__(self, records: Sequence[GraphRecord]) -> None:
        lanes = max((record.bucket.lanes for record in records), default=1)
        serving = [
            record for record in records if record.serves and not record.bucket.packed and record.bucket.lanes == lanes
        ]
        self._lengths = sorted({record.bucket.length for record in serving})
        times = _undisturbed(serving)
        largest = max((record.bucket.batch for record in serving), default=0)
        # Milliseconds of so many items, none longer than that class: [class][count].
        self._costs = [[_quickest(times, count, length) for count in range(largest + 1)] for length in self._lengths]

    def choose(self, lengths: Sequence[int]) -> list[int]:
        """Places of the items, given by token counts in the order they wait, to run now; the first is among them.

        All are split into groups of like length so that the sum of their times is least; the first's group is given.
        """
        if len(lengths) < 2 or not self._costs or len(lengths) >= len(self._costs[0]):
            return list(range(len(lengths)))
        classes = [min(bisect_left(self._lengths, length), len(self._lengths) - 1) for length in lengths]
        order = sorted(range(len(lengths)), key=lambda place: (classes[place], place))
        # least[i]: the time of the first i in order; start[i]: where the last of their groups begins.
        least, start = [0.0] + [inf] * len(order), [0] * (len(order) + 1)
        for end in range(1, len(order) + 1):
            costs = self._costs[classes[order[end - 1]]]
            for begin in range(end):  # the longest group first, so that of equals the fuller one stays
                time = least[begin] + costs[end - begin]
                if time < least[end]:
                    least[end], start[end] = time, begin
        groups = []
        end = len(order)
        while end:
            groups.append(order[start[end] : end])
            end = start[end]
        return self._fullest_with_the_first(groups, classes)

    @staticmethod
    def _fullest_with_the_first(groups: list[list[int]], classes: list[int]) -> list[int]:
        """Items of one class may change places between groups, so the first joins the largest of its class."""
        alike = [group for group in groups if all(classes[place] == classes[0] for place in group)]
        own = next(group for group in groups if 0 in group)
        size = max((len(group) for group in alike), default=0)
        if size <= len(own):
            return sorted(own)
        return [place for place, one in enumerate(classes) if one == classes[0]][:size]


def _undisturbed(records: Sequence[GraphRecord]) -> dict[Bucket, float]:
    """Milliseconds of each bucket; of a ready one at most those of smaller ready ones of its length in its place."""
    times = {record.bucket: _milliseconds(record) for record in records}
    ready = sorted(record.bucket for record in records if record.state == "ready")
    for bucket in ready:
        # least[n]: the time of n items by smaller buckets.
        least = [0.0] + [inf] * bucket.batch
        smaller = [one for one in ready if one.length == bucket.length and one.batch < bucket.batch]
        for count in range(1, bucket.batch + 1):
            least[count] = min((least[max(0, count - one.batch)] + times[one] for one in smaller), default=inf)
        times[bucket] = min(times[bucket], least[bucket.batch])
    return times


def _quickest(times: Mapping[Bucket, float], count: int, length: int) -> float:
    """Of the buckets that take so many items of that length; 0 for none."""
    if not count:
        return 0.0
    return min((ms for bucket, ms in times.items() if bucket.batch >= count and bucket.length >= length), default=inf)


def _milliseconds(record: GraphRecord) -> float:
    return (record.device_ms if record.state == "ready" else record.eager_ms) or inf
