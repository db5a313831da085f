"""What the demo's pictures show, and the captions that say it.

A scene is one to four things. A thing is a coloured shape. Words, wordings and wrong captions live here; nothing
here draws, and nothing here needs more than numpy.
"""

from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

SHAPES = ("circle", "square", "triangle", "star", "cross", "heart", "ring", "diamond")
COLOURS = ("red", "green", "blue", "yellow", "orange", "purple", "white", "black")
NUMBERS = ("one", "two", "three", "four")
PREFIXES = ("", "a picture of ", "a photo of ", "an image of ", "a drawing of ")

Layout = Literal["single", "count", "left", "above"]

# wordings of "A is left of B" and its three siblings, for each way to look at the same pair
RELATIONS: dict[str, tuple[str, ...]] = {
    "left": ("left of", "to the left of", "on the left of"),
    "right": ("right of", "to the right of", "on the right of"),
    "above": ("above", "over"),
    "below": ("below", "under"),
}
TURNED = {"left": "above", "right": "below", "above": "left", "below": "right"}
OPPOSITE = {"left": "right", "right": "left", "above": "below", "below": "above"}


@dataclass(frozen=True)
class Thing:
    """One coloured shape, such as a red circle."""

    colour: str
    shape: str

    def __str__(self) -> str:
        return f"{self.colour} {self.shape}"

    @property
    def plural(self) -> str:
        return f"{self}es" if self.shape.endswith("s") else f"{self}s"


@dataclass(frozen=True)
class Scene:
    """What one picture shows.

    `single`: one thing. `count`: two to four equal things. `left` and `above`: two things, the first of which is
    left of, or above, the second.
    """

    layout: Layout
    things: tuple[Thing, ...]


# Never drawn in training, so that reading them needs colour and shape apart, not a memory of the two together.
UNSEEN = frozenset(Thing(colour, shape) for colour, shape in zip(COLOURS, SHAPES[3:] + SHAPES[:3], strict=True))
THINGS = tuple(Thing(colour, shape) for colour in COLOURS for shape in SHAPES)
SEEN = tuple(thing for thing in THINGS if thing not in UNSEEN)


def with_article(thing: Thing) -> str:
    return f"{'an' if thing.colour[0] in 'aeiou' else 'a'} {thing}"


def relation_caption(first: Thing, relation: str, second: Thing, wording: int = 0, definite: bool = False) -> str:
    """Say how `first` lies towards `second`: "a red circle left of a blue square".

    `wording` picks among the ways to say the relation; `definite` writes "the red circle is left of the blue square".
    """
    words = RELATIONS[relation][wording % len(RELATIONS[relation])]
    if definite:
        return f"the {first} is {words} the {second}"
    return f"{with_article(first)} {words} {with_article(second)}"


def plain_caption(scene: Scene) -> str:
    """The shortest true caption of a scene, always in the same wording."""
    first = scene.things[0]
    if scene.layout == "single":
        return with_article(first)
    if scene.layout == "count":
        return f"{NUMBERS[len(scene.things) - 1]} {first.plural}"
    return relation_caption(first, scene.layout, scene.things[1])


def caption(scene: Scene, rng: np.random.Generator) -> str:
    """A true caption of a scene in a wording drawn from `rng`."""
    if scene.layout in ("single", "count"):
        return PREFIXES[rng.integers(len(PREFIXES))] + plain_caption(scene)
    first, second = scene.things
    relation: str = scene.layout
    if rng.random() < 0.5:
        first, relation, second = second, OPPOSITE[relation], first
    definite = bool(rng.random() < 0.3)
    prefix = "" if definite else PREFIXES[rng.integers(len(PREFIXES))]
    return prefix + relation_caption(first, relation, second, int(rng.integers(6)), definite)


def relation_candidates(scene: Scene, rng: np.random.Generator) -> list[str]:
    """Nine captions of a two-thing scene in one wording; the first alone is true.

    The next three swap the relation, the two things, or the two colours. The rest swap the two shapes and turn left
    into above and so on, which makes up every way to put two colours, two shapes and a relation together. All nine
    hold nearly the same words, so only a reader that keeps word order can tell them apart.
    """
    first, second = scene.things
    relation: str = scene.layout
    if rng.random() < 0.5:
        first, relation, second = second, OPPOSITE[relation], first
    wording, definite = int(rng.integers(6)), bool(rng.random() < 0.3)
    turned = TURNED[relation]
    painted = replace(first, colour=second.colour), replace(second, colour=first.colour)
    told = (
        (first, relation, second),
        (first, OPPOSITE[relation], second),
        (second, relation, first),
        (painted[0], relation, painted[1]),
        (painted[1], relation, painted[0]),
        (first, turned, second),
        (second, turned, first),
        (painted[0], turned, painted[1]),
        (painted[1], turned, painted[0]),
    )
    return [relation_caption(a, word, b, wording, definite) for a, word, b in told]


def siblings(first: Thing, second: Thing) -> list[Scene]:
    """The eight scenes that share two colours and two shapes: every relation, with the colours both ways."""
    painted = replace(first, colour=second.colour), replace(second, colour=first.colour)
    layouts: tuple[Layout, ...] = ("left", "above")
    return [
        Scene(layout, pair) for a, b in ((first, second), painted) for layout in layouts for pair in ((a, b), (b, a))
    ]


def pick_pair(things: tuple[Thing, ...], rng: np.random.Generator) -> tuple[Thing, Thing]:
    """Two things of `things` with different colours and shapes whose recoloured twins are in `things` as well."""
    while True:
        first, second = (things[i] for i in rng.choice(len(things), 2, replace=False))
        if first.colour == second.colour or first.shape == second.shape:
            continue
        if Thing(first.colour, second.shape) in things and Thing(second.colour, first.shape) in things:
            return first, second


def training_scenes(rng: np.random.Generator, pairs: int, singles: int, counts: int) -> list[Scene]:
    """The scenes of one training batch, no two of which mean the same.

    Returns `8 * pairs + singles + counts` scenes; each pair brings its hard negatives (see `siblings`) with it.
    """
    chosen: set[frozenset[Thing]] = set()
    scenes: list[Scene] = []
    while len(chosen) < pairs:
        first, second = pick_pair(SEEN, rng)
        group = siblings(first, second)
        key = frozenset(thing for scene in group for thing in scene.things)
        if key not in chosen:
            chosen.add(key)
            scenes += group
    scenes += [Scene("single", (SEEN[i],)) for i in rng.choice(len(SEEN), singles, replace=False)]
    for index in rng.choice(len(SEEN) * 3, counts, replace=False):
        scenes.append(Scene("count", (SEEN[index // 3],) * (2 + int(index) % 3)))
    return scenes
