"""Pictures: the same for the same seed, and showing what their captions say."""

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from encoder.demo import demo_labels, demo_pictures
from encoder.demo.draw import PALETTE, draw, outline
from encoder.demo.samples import draw_samples
from encoder.demo.scenes import (
    SHAPES,
    UNSEEN,
    Scene,
    Thing,
    caption,
    plain_caption,
    relation_candidates,
    training_scenes,
)

RED_CIRCLE, BLUE_SQUARE = Thing("red", "circle"), Thing("blue", "square")


def whereabouts(picture: Image.Image, colour: str) -> NDArray[np.float64]:
    """The mean (x, y) of the pixels near a palette colour."""
    apart = np.linalg.norm(np.asarray(picture, dtype=float) - PALETTE[colour], axis=-1)
    y, x = np.nonzero(apart < 45)
    assert len(x) > 20, f"no {colour} thing in the picture"
    return np.array([x.mean(), y.mean()])


def test_one_seed_draws_one_picture_and_another_seed_another() -> None:
    scene = Scene("left", (RED_CIRCLE, BLUE_SQUARE))
    first, again, other = (np.asarray(draw(scene, np.random.default_rng(seed), (96, 64))) for seed in (3, 3, 4))
    assert first.shape == (64, 96, 3)
    assert np.array_equal(first, again)
    assert not np.array_equal(first, other)


@pytest.mark.parametrize("layout", ["left", "above"])
@pytest.mark.parametrize("size", [(160, 160), (240, 160), (120, 180)])
def test_things_lie_as_the_scene_says_inside_the_centred_square(layout: str, size: tuple[int, int]) -> None:
    axis = 0 if layout == "left" else 1
    short = min(size)
    for seed in range(12):
        scene = Scene(layout, (RED_CIRCLE, BLUE_SQUARE))
        picture = draw(scene, np.random.default_rng(seed), size, grain=0.0)
        left, top = (size[0] - short) // 2, (size[1] - short) // 2
        cropped = picture.crop((left, top, left + short, top + short))
        red, blue = whereabouts(cropped, "red"), whereabouts(cropped, "blue")
        assert blue[axis] - red[axis] > 0.2 * short
        assert abs(blue[1 - axis] - red[1 - axis]) < blue[axis] - red[axis]


def test_every_shape_has_an_outline_of_its_own() -> None:
    assert len({outline(shape) for shape in SHAPES}) == len(SHAPES)
    with pytest.raises(ValueError, match="'hexagon'"):
        outline("hexagon")


def test_counts_draw_that_many_separate_things() -> None:
    for number in (2, 3, 4):
        scene = Scene("count", (Thing("white", "circle"),) * number)
        for seed in range(5):
            picture = draw(scene, np.random.default_rng(seed), (150, 150), grain=0.0)
            assert islands(np.linalg.norm(np.asarray(picture, dtype=float) - PALETTE["white"], axis=-1) < 40) == number


def islands(mask: NDArray[np.bool_]) -> int:
    """How many connected groups of more than 20 set pixels a mask holds."""
    left, found = set(zip(*np.nonzero(mask), strict=True)), 0
    while left:
        edge, size = [left.pop()], 1
        while edge:
            y, x = edge.pop()
            near = {(y + 1, x), (y - 1, x), (y, x + 1), (y, x - 1)} & left
            left -= near
            edge += near
            size += len(near)
        found += size > 20
    return found


def test_captions_say_what_is_drawn() -> None:
    assert plain_caption(Scene("single", (Thing("orange", "ring"),))) == "an orange ring"
    assert plain_caption(Scene("count", (Thing("green", "cross"),) * 3)) == "three green crosses"
    scene = Scene("above", (RED_CIRCLE, BLUE_SQUARE))
    assert plain_caption(scene) == "a red circle above a blue square"
    rng = np.random.default_rng(0)
    for text in {caption(scene, rng) for _ in range(200)}:
        red_first = text.index("red circle") < text.index("blue square")
        assert ("above" in text or "over" in text) == red_first
        assert ("below" in text or "under" in text) == (not red_first)


def test_wrong_captions_swap_relation_things_or_colours() -> None:
    rng = np.random.default_rng(1)
    seen: set[tuple[str, ...]] = set()
    for _ in range(200):
        candidates = relation_candidates(Scene("left", (RED_CIRCLE, BLUE_SQUARE)), rng)
        assert len(set(candidates)) == 9
        seen.add(tuple(candidates[:4]))
    assert (
        "a red circle left of a blue square",
        "a red circle right of a blue square",
        "a blue square left of a red circle",
        "a blue circle left of a red square",
    ) in seen
    for true, *wrong in seen:
        assert (true.index("red circle") < true.index("blue square")) == ("left" in true)
        assert len(wrong) == 3


def test_a_training_batch_repeats_no_meaning_and_shows_no_held_out_thing() -> None:
    scenes = training_scenes(np.random.default_rng(5), pairs=16, singles=48, counts=32)
    assert len(scenes) == len(set(scenes)) == 16 * 8 + 48 + 32
    assert not {thing for scene in scenes for thing in scene.things} & UNSEEN
    assert len(UNSEEN) == 8


def test_sample_pictures_are_small_varied_and_reproducible(tmp_path) -> None:  # type: ignore[no-untyped-def]
    pictures, labels = demo_pictures(), demo_labels()
    assert len(pictures) == len(set(labels)) == len(labels) == 12
    assert sum(picture.stat().st_size for picture in pictures) < 400_000
    assert {Image.open(picture).format for picture in pictures} == {"JPEG", "PNG", "WEBP"}
    assert (640, 480) in {Image.open(picture).size for picture in pictures}
    for picture, label in zip(pictures, labels, strict=True):
        assert picture.stem == "-".join(word for word in label.split() if word not in ("a", "an"))
    draw_samples(tmp_path)
    assert (tmp_path / "labels.json").read_text() == (pictures[0].parent / "labels.json").read_text()
    for picture in (p for p in pictures if p.suffix == ".png"):
        assert np.array_equal(np.asarray(Image.open(picture)), np.asarray(Image.open(tmp_path / picture.name)))
