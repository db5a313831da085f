"""Packed buckets: what fits, how the filler is cut, and that it changes nobody's vector."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from encoder.graphs.batches import fits, split
from encoder.graphs.packing import packed_buckets, pad_packed
from encoder.graphs.runner import Bucket
from encoder.models.tower import Windows

BUCKET = Bucket(4, tokens=40, segments=7, max_length=16)


def packed(lengths: list[int]) -> dict[str, torch.Tensor]:
    total = sum(lengths)
    return {
        "patches": torch.arange(1.0, 2 * total + 1).view(total, 2),
        "places": torch.arange(1, total + 1),
        "cu_seqlens": torch.tensor(np.cumsum([0, *lengths]), dtype=torch.int32),
    }


def test_by_hand() -> None:
    """5 + 2 tokens of 40: the filler of 33 is cut at 16, and one boundary is left over."""
    inputs = packed([5, 2])
    padded = pad_packed(inputs, BUCKET)
    assert padded["cu_seqlens"].tolist() == [0, 5, 7, 23, 39, 40, 40, 40]
    assert padded["cu_seqlens"].dtype == torch.int32
    assert padded["patches"].shape == (40, 2) and padded["places"].shape == (40,)
    assert torch.equal(padded["patches"][:7], inputs["patches"]) and torch.equal(padded["places"][:7], inputs["places"])
    assert torch.count_nonzero(padded["patches"][7:]) == 0 and torch.count_nonzero(padded["places"][7:]) == 0


def test_a_full_bucket_has_no_filler() -> None:
    assert pad_packed(packed([16, 16, 8]), BUCKET)["cu_seqlens"].tolist() == [0, 16, 32, 40, 40, 40, 40, 40]


@pytest.mark.parametrize(
    ("lengths", "reason"),
    [([17], "longer than an item may be"), ([16, 16, 9], "too many tokens"), ([1] * 5, "too many items")],
)
def test_what_does_not_fit_is_refused(lengths: list[int], reason: str) -> None:
    assert not fits(BUCKET, lengths), reason
    with pytest.raises(ValueError, match="does not fit bucket tokens=40,segments=7,max_length=16"):
        pad_packed(packed(lengths), BUCKET)


def test_segments_count_the_filler_too() -> None:
    """Four items would do, but not beside the three pieces of their filler."""
    tight = Bucket(4, tokens=40, segments=6, max_length=16)
    assert fits(tight, [1] * 3) and not fits(tight, [1] * 4) and fits(tight, [2] * 3 + [16])


@settings(max_examples=200, deadline=None)
@given(
    st.integers(1, 60),
    st.lists(st.integers(1, 5), min_size=1, max_size=4, unique=True),
    st.lists(st.integers(1, 60), min_size=1, max_size=12),
)
def test_whatever_fits_by_count_and_tokens_is_covered(longest: int, batches: list[int], lengths: list[int]) -> None:
    for bucket in packed_buckets(longest, batches):
        chosen = [length for length in lengths if length <= bucket.max_length][: bucket.batch]
        while sum(chosen) > bucket.tokens:
            chosen.pop()
        if not chosen:
            continue
        assert fits(bucket, chosen)
        ends = pad_packed(packed(chosen), bucket)["cu_seqlens"].tolist()
        pieces = [end - start for start, end in pairwise(ends)]
        assert len(pieces) == bucket.segments and ends[-1] == bucket.tokens
        assert pieces[: len(chosen)] == chosen
        assert all(0 <= piece <= bucket.max_length for piece in pieces)


def test_buckets_of_a_family() -> None:
    """Parts of the longest item first, so that a small one alone is not padded to it; then as many as were asked."""
    assert [(b.tokens, b.max_length, b.batch, b.segments) for b in packed_buckets(16, [1, 4])] == [
        (4, 4, 4, 5),
        (8, 8, 4, 5),
        (16, 16, 4, 5),
        (64, 16, 4, 8),
    ]
    assert [bucket.cost for bucket in packed_buckets(16, [1, 4])] == [4, 8, 16, 64]


def test_budgets_within_a_limit() -> None:
    """A longest item beyond it has no budget of its own; all are multiples, even of limits that are none."""
    assert [b.tokens for b in packed_buckets(16384, [1, 2, 32], limit=1024)] == [256, 512, 1024]
    assert [b.tokens for b in packed_buckets(256, [1, 2, 4, 8], limit=1024)] == [64, 128, 256, 512, 1024]
    assert [b.tokens for b in packed_buckets(300, [4], limit=1024)] == [75, 150, 300]
    odd = packed_buckets(999, [1, 2], limit=500, multiple=4)
    assert [(b.tokens, b.max_length) for b in odd] == [(124, 124), (248, 248), (500, 500)]
    assert [b.tokens for b in packed_buckets(64, [1], limit=3, multiple=4)] == [4]


def test_windows_are_padded_as_items_are() -> None:
    """By hand: 5 tokens in windows of 2, 2 and 1, filled up to 12 by pieces of at most 3."""
    bucket = packed_buckets(12, [2], limit=12, windows=Windows(longest=3, share=2))[-1]
    assert (bucket.tokens, bucket.windows, bucket.max_window) == (12, 9, 3)
    inputs = {"cu_seqlens": torch.tensor([0, 5]), "cu_window_seqlens": torch.tensor([0, 2, 4, 5]), "x": torch.ones(5)}
    padded = pad_packed(inputs, bucket)
    assert padded["cu_window_seqlens"].tolist() == [0, 2, 4, 5, 8, 11, 12, 12, 12, 12]
    assert padded["cu_seqlens"].tolist()[:3] == [0, 5, 12] and padded["x"].tolist() == [1] * 5 + [0] * 7
    wide = {**inputs, "cu_window_seqlens": torch.tensor([0, 4, 5])}
    with pytest.raises(ValueError, match="do not fit 12 tokens in 9 pieces of up to 3"):
        pad_packed(wide, bucket)


def test_splitting_fills_in_order_and_leaves_giants_alone() -> None:
    assert split([10, 10, 10, 10, 10], [BUCKET]) == [[0, 1, 2, 3], [4]]
    assert split([16, 16, 16, 1], [BUCKET]) == [[0, 1], [2, 3]]
    assert split([3, 99, 4], [BUCKET]) == [[1], [0, 2]]
    assert split([99], [BUCKET]) == [[0]]
    assert split([1] * 9, [Bucket(1), Bucket(4)]) == [[0, 1, 2, 3], [4, 5, 6, 7], [8]]
    assert split([5, 20, 5], [Bucket(2, 8), Bucket(1, 32)]) == [[0], [1], [2]]


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=30))
def test_a_split_loses_nobody(lengths: list[int]) -> None:
    groups = split(lengths, [BUCKET, Bucket(2, tokens=20, segments=4, max_length=16)])
    assert sorted(place for group in groups for place in group) == list(range(len(lengths)))
    for group in groups:
        chosen = [lengths[place] for place in group]
        assert fits(BUCKET, chosen) or (len(group) == 1 and chosen[0] > 16)
