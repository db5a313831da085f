"""Which bucket is taken, and that filler changes nothing."""

import numpy as np
import pytest
import torch

from encoder.graphs.packing import packed_buckets
from encoder.graphs.runner import Bucket
from tests.graphs.fakes import Pictures, Texts, packed_tower
from tests.graphs.forwards import (
    PACKED,
    PICTURES,
    TEXTS,
    expected_pictures,
    expected_texts,
    pictures_of,
    watched,
)
from tests.support.packed_tower import alone, pictures


@pytest.mark.parametrize(("count", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4)])
def test_the_smallest_bucket_that_fits_is_taken_and_filled(count: int, bucket: int) -> None:
    tower = Pictures()
    forward, runner = watched(tower, PICTURES)
    items = pictures_of(count)
    found = forward.run(items)
    vectors, name = found.vectors, found.runner
    assert runner.given == [(Bucket(bucket), {"pixels": (bucket, 6)})]
    assert name == "recorded" and vectors.shape == (count, 5) and vectors.dtype == np.float32
    assert np.abs(vectors - expected_pictures(tower, items)).max() <= 1e-5
    assert forward.counters == {"graph_replay": 1}


def test_more_than_the_largest_bucket_goes_in_turns_and_in_order() -> None:
    tower = Pictures()
    forward, runner = watched(tower, PICTURES)
    items = pictures_of(9)
    vectors = forward.run(items).vectors
    assert [bucket.batch for bucket, _ in runner.given] == [4, 4, 1]
    assert np.abs(vectors - expected_pictures(tower, items)).max() <= 1e-5


@pytest.mark.parametrize(
    ("lengths", "bucket"), [([3], (1, 4)), ([5], (1, 8)), ([3, 4], (2, 4)), ([2, 9, 3], (4, 16)), ([16], (1, 16))]
)
def test_texts_go_by_count_and_length(lengths: list[int], bucket: tuple[int, int]) -> None:
    tower = Texts()
    forward, runner = watched(tower, TEXTS)
    items = [list(range(5, 5 + length)) for length in lengths]
    vectors = forward.run(items).vectors
    assert runner.given == [(Bucket(*bucket), {"ids": bucket, "mask": bucket})]
    assert np.abs(vectors - expected_texts(tower, items)).max() <= 1e-5


def expected_features(tower: Pictures, item: np.ndarray) -> np.ndarray:
    return np.tanh(item.astype(np.float64) @ tower.weights[0].double().numpy()).reshape(3, 3)


def test_features_come_only_when_asked_for_one_block_an_item() -> None:
    tower = Pictures()
    forward, _ = watched(tower, PICTURES)
    items = pictures_of(7)
    assert forward.run(items).tokens == []
    found = forward.run(items, tokens=True)
    assert [features.shape for features in found.tokens] == [(3, 3)] * 7
    for item, features in zip(items, found.tokens, strict=True):
        assert np.abs(features - expected_features(tower, item)).max() <= 1e-5
    assert np.array_equal(found.vectors, forward.run(items).vectors)


def test_packed_features_are_each_items_own() -> None:
    """The mean of an item's features, projected, is its vector."""
    tower = packed_tower()
    forward, _ = watched(tower, PACKED)
    items = pictures([5, 16, 1, 9, 16, 16, 2], seed=4)
    found = forward.run(items, tokens=True)
    assert [len(features) for features in found.tokens] == [5, 16, 1, 9, 16, 16, 2]
    for item, features, vector in zip(items, found.tokens, found.vectors, strict=True):
        assert np.abs(tower.module.project(torch.from_numpy(features).mean(0)).numpy() - vector).max() <= 1e-5
        assert np.abs(vector - alone(tower.module, item)).max() <= 1e-5


def test_an_item_that_fits_no_bucket_runs_eager_alone() -> None:
    tower = Texts()
    forward, runner = watched(tower, [bucket for bucket in TEXTS if bucket.length <= 8])
    items = [list(range(length)) for length in (3, 12, 4)]
    found = forward.run(items)
    vectors, name = found.vectors, found.runner
    assert name == "eager+recorded" and [bucket for bucket, _ in runner.given] == [Bucket(2, 4)]
    assert forward.counters == {"graph_replay": 1, "eager_run": 1}
    assert np.abs(vectors - expected_texts(tower, items)).max() <= 1e-5


@pytest.mark.parametrize("lengths", [[5], [4, 1, 3], [16, 16, 16], [9, 2, 16, 7, 1, 11, 16, 3], [1] * 20])
def test_packed_items_are_as_alone(lengths: list[int]) -> None:
    tower = packed_tower()
    forward, runner = watched(tower, PACKED)
    items = pictures(lengths, seed=5)
    found = forward.run(items)
    vectors, name = found.vectors, found.runner
    assert name == "recorded"
    assert np.abs(vectors - np.stack([alone(tower.module, item) for item in items])).max() <= 1e-5
    for bucket, shapes in runner.given:
        wanted = {"patches": (bucket.tokens, 12), "places": (bucket.tokens,), "cu_seqlens": (bucket.segments + 1,)}
        assert shapes == wanted


def test_packed_items_take_the_smallest_budget() -> None:
    tower = packed_tower()
    forward, runner = watched(tower, PACKED)
    for lengths in ([4], [2, 2], [5], [16], [16, 1]):
        forward.run(pictures(lengths, seed=1))
    assert [bucket.tokens for bucket, _ in runner.given] == [8, 8, 8, 16, 48]


def test_a_giant_among_packed_items_runs_eager_alone() -> None:
    """Longer than any bucket takes, though the model has places for it."""
    tower = packed_tower()
    forward, runner = watched(tower, packed_buckets(8, [1, 3]))
    items = pictures([3, 14, 5], seed=2)
    found = forward.run(items)
    vectors, name = found.vectors, found.runner
    assert name == "eager+recorded" and [bucket.tokens for bucket, _ in runner.given] == [8]
    assert np.abs(vectors - np.stack([alone(tower.module, item) for item in items])).max() <= 1e-5
