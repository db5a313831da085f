"""From prepared items to the inputs of a bucket: what fits, how a list is split, how the rest is filled."""

from collections.abc import Collection, Sequence
from math import prod
from typing import Any

import numpy as np
import torch

from encoder.graphs.packing import fits_packed, pad_packed
from encoder.graphs.runner import Bucket
from encoder.models.tower import Tower


def fits(bucket: Bucket, lengths: Sequence[int]) -> bool:
    """Whether items of these token counts fit a bucket together."""
    if bucket.packed:
        return fits_packed(bucket, lengths)
    return len(lengths) <= bucket.batch and (not bucket.length or max(lengths) <= bucket.length)


def split(lengths: Sequence[int], buckets: Collection[Bucket]) -> list[list[int]]:
    """Places of the items in groups, in order, each as full as some bucket takes; what fits none is alone."""
    if any(fits(bucket, lengths) for bucket in buckets):
        return [list(range(len(lengths)))]
    groups: list[list[int]] = []
    current: list[int] = []
    for place, length in enumerate(lengths):
        if not any(fits(bucket, [length]) for bucket in buckets):
            groups.append([place])
            continue
        together = [lengths[i] for i in current] + [length]
        if not any(fits(bucket, together) for bucket in buckets):
            groups.append(current)
            current = []
        current.append(place)
    return [*groups, current] if current else groups


def bucket_inputs(tower: Tower[Any], items: Sequence[Any], bucket: Bucket) -> dict[str, torch.Tensor]:
    """Host inputs of exactly the bucket's size; the items' rows come first, the rest is filler."""
    if bucket.packed:
        return pad_packed(tower.gather(items), bucket)
    filled = [*items, *([items[-1]] * (bucket.batch - len(items)))]
    return tower.gather(filled, length=bucket.length or None)


def split_tokens(tower: Tower[Any], items: Sequence[Any], tokens: np.ndarray) -> list[np.ndarray]:
    """Features of each item, [t, F], out of a batch's: [n, t, F], or [T, F] of a packed one; filler is left out."""
    if not tower.spec.packed:
        return [features[: prod(tower.grid_of(item))] for item, features in zip(items, tokens, strict=False)]
    ends = np.cumsum([prod(tower.grid_of(item)) for item in items])
    return np.split(tokens[: ends[-1]], ends[:-1])
