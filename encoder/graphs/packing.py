"""Packed batches: items of any token count in one row of tokens, with boundaries, padded to a bucket.

What stands behind the last item is no gap but real segments of zeros: some kernels corrupt rows that no segment
covers, and Ascend's wants the last boundary to be the last token. No padding segment is longer than an item may be,
and boundaries that are left over repeat the last one.
"""

from collections.abc import Sequence
from itertools import pairwise

import torch

from encoder.graphs.runner import BOUNDARIES, Bucket
from encoder.models.tower import Inputs

# Shares of the longest item that get a bucket of their own, so that a small item alone is not padded to the longest.
SMALL_SHARES = (4, 2)


def packed_buckets(longest: int, batches: Sequence[int]) -> list[Bucket]:
    """Token budgets for items of up to `longest` tokens: parts of one, and as many of the longest as `batches` say.

    In each there is room for the most items of `batches`, and for the padding segments of any number of them.
    """
    budgets = {max(1, longest // share) for share in SMALL_SHARES} | {longest * batch for batch in batches}
    buckets = []
    for tokens in sorted(budgets):
        items, max_length = min(max(batches), tokens), min(tokens, longest)
        segments = items + _pieces(tokens, max_length)
        buckets.append(Bucket(items, tokens=tokens, segments=segments, max_length=max_length))
    return buckets


def fits_packed(bucket: Bucket, lengths: Sequence[int]) -> bool:
    """Whether items of these token counts fit, together with the padding that fills the bucket."""
    total = sum(lengths)
    return (
        len(lengths) <= bucket.batch
        and total <= bucket.tokens
        and max(lengths) <= bucket.max_length
        and len(lengths) + _pieces(bucket.tokens - total, bucket.max_length) <= bucket.segments
    )


def pad_packed(inputs: Inputs, bucket: Bucket) -> dict[str, torch.Tensor]:
    """Exact packed inputs as the bucket's: tensors [T, ...] with zeros up to its tokens, boundaries up to its segments.

    Raises ValueError when they do not fit.
    """
    ends = inputs[BOUNDARIES].tolist()
    total = ends[-1]
    if not fits_packed(bucket, [end - start for start, end in pairwise(ends)]):
        raise ValueError(f"packed batch with boundaries {ends} does not fit bucket {bucket}")
    while ends[-1] < bucket.tokens:
        ends.append(min(ends[-1] + bucket.max_length, bucket.tokens))
    ends += [bucket.tokens] * (bucket.segments + 1 - len(ends))
    padded = {BOUNDARIES: torch.tensor(ends, dtype=torch.int32)}
    for name, tensor in inputs.items():
        if name != BOUNDARIES:
            padded[name] = torch.cat([tensor, tensor.new_zeros(bucket.tokens - total, *tensor.shape[1:])])
    return padded


def _pieces(tokens: int, max_length: int) -> int:
    """How many segments so many tokens make."""
    return -(-tokens // max_length)
