"""Packed batches: items of any token count in one row of tokens, with boundaries, padded to a bucket.

What stands behind the last item is no gap but real segments of zeros: some kernels corrupt rows that no segment
covers, and Ascend's wants the last boundary to be the last token. No padding segment is longer than an item may be,
and boundaries that are left over repeat the last one.
"""

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import torch

from encoder.graphs.runner import BOUNDARIES, WINDOWS, Bucket
from encoder.models.tower import Inputs, Windows

# Shares of the longest item that get a bucket of their own, so that a small item alone is not padded to the longest.
SMALL_SHARES = (4, 2)


def packed_buckets(
    longest: int,
    batches: Sequence[int],
    *,
    limit: int | None = None,
    multiple: int = 1,
    windows: Windows | None = None,
) -> list[Bucket]:
    """Token budgets for items of up to `longest` tokens: parts of one, and as many of the longest as `batches` say.

    In each there is room for the most items of `batches`, and for the padding segments of any number of them. None is
    above `limit` tokens, which then stands for the longest item where that is longer: a longer one runs eager. Token
    counts are multiples of `multiple`, as those of the items are.
    """
    longest = max(multiple, min(longest, limit or longest) // multiple * multiple)
    shares = {max(multiple, longest // share // multiple * multiple) for share in SMALL_SHARES}
    whole = {longest * batch for batch in batches if limit is None or longest * batch <= limit} or {longest}
    buckets = []
    for tokens in sorted(shares | whole):
        items, max_length = min(max(batches), tokens // multiple), min(tokens, longest)
        bucket = Bucket(items, tokens=tokens, segments=items + _pieces(tokens, max_length), max_length=max_length)
        if windows is not None:
            # The windows of the items, and as many as the filler behind them takes.
            most, max_window = windows.most(tokens, items) + 1, min(windows.longest, tokens)
            bucket = replace(bucket, windows=most, max_window=max_window)
        buckets.append(bucket)
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
    if not fits_packed(bucket, [end - start for start, end in pairwise(ends)]):
        raise ValueError(f"packed batch with boundaries {ends} does not fit bucket {bucket}")
    padded = {BOUNDARIES: _pad_boundaries(ends, bucket.tokens, bucket.max_length, bucket.segments)}
    if WINDOWS in inputs:
        padded[WINDOWS] = _pad_boundaries(inputs[WINDOWS].tolist(), bucket.tokens, bucket.max_window, bucket.windows)
    for name, tensor in inputs.items():
        if name not in padded:
            padded[name] = torch.cat([tensor, tensor.new_zeros(bucket.tokens - ends[-1], *tensor.shape[1:])])
    return padded


def _pad_boundaries(ends: list[int], tokens: int, longest: int, pieces: int) -> torch.Tensor:
    """int32 [pieces + 1]: further pieces up to `tokens`, none longer than `longest`, then empty ones."""
    filled = list(ends)
    while filled[-1] < tokens:
        filled.append(min(filled[-1] + longest, tokens))
    if len(filled) > pieces + 1 or max(end - start for start, end in pairwise(filled)) > longest:
        raise ValueError(f"boundaries {ends} do not fit {tokens} tokens in {pieces} pieces of up to {longest}")
    return torch.tensor(filled + [tokens] * (pieces + 1 - len(filled)), dtype=torch.int32)


def _pieces(tokens: int, max_length: int) -> int:
    """How many segments so many tokens make."""
    return -(-tokens // max_length)
