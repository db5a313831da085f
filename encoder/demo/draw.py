"""Draw the demo's pictures: coloured shapes on varied backgrounds, the same for the same seed."""

import math
from functools import cache

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageDraw

from encoder.demo.scenes import Scene

Points = NDArray[np.float64]
RGB = NDArray[np.float64]

PALETTE: dict[str, tuple[int, int, int]] = {
    "red": (214, 32, 38),
    "green": (38, 152, 58),
    "blue": (36, 76, 208),
    "yellow": (244, 220, 48),
    "orange": (242, 132, 24),
    "purple": (140, 50, 168),
    "white": (248, 248, 248),
    "black": (14, 14, 16),
}
SUPERSAMPLING = 3
TRIANGLE_DEVIATION = math.sqrt(2 * (256**2 - 1) / 12)  # of the sum of two uniform draws from 0..255
MINIMUM_CONTRAST = 80.0  # distance in RGB between a thing and what lies behind it


@cache
def outline(shape: str) -> tuple[tuple[tuple[float, float], ...], ...]:
    """Closed outlines of a shape inside the unit circle, y downwards; a second outline is a hole."""

    def around(count: int, radii: tuple[float, ...] = (1.0,), turn: float = -0.25) -> tuple[tuple[float, float], ...]:
        angles = [2 * math.pi * (i / count + turn) for i in range(count)]
        return tuple(
            (radii[i % len(radii)] * math.cos(a), radii[i % len(radii)] * math.sin(a)) for i, a in enumerate(angles)
        )

    if shape == "circle":
        return (around(48, (0.92,)),)
    if shape == "ring":
        return (around(48, (0.96,)), around(48, (0.54,)))
    if shape == "square":
        return (around(4, (1.12,), turn=0.125),)
    if shape == "triangle":
        return (around(3, (1.1,)),)
    if shape == "star":
        return (around(10, (1.1, 0.45)),)
    if shape == "diamond":
        return (((0.0, -1.12), (0.66, 0.0), (0.0, 1.12), (-0.66, 0.0)),)
    if shape == "cross":
        w, h = 0.3, 1.0
        corners = [(-w, -h), (w, -h), (w, -w), (h, -w), (h, w), (w, w), (w, h), (-w, h), (-w, w), (-h, w), (-h, -w)]
        return ((*corners, (-w, -w)),)
    if shape == "heart":
        turns = [2 * math.pi * i / 48 for i in range(48)]
        return (
            tuple(
                (
                    math.sin(t) ** 3,
                    -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 16.5 - 0.1,
                )
                for t in turns
            ),
        )
    raise ValueError(f"cannot draw the shape {shape!r}: no outline is known; add one to outline()")


def stencil(shape: str, radius: float, turn: float) -> Image.Image:
    """An antialiased "L" mask of a shape of `radius` pixels turned by `turn` radians, centred in its square."""
    half = math.ceil(radius * 1.2) + 1
    side = 2 * half * SUPERSAMPLING
    mask = Image.new("L", (side, side), 0)
    pen = ImageDraw.Draw(mask)
    cosine, sine = math.cos(turn), math.sin(turn)
    for number, points in enumerate(outline(shape)):
        scale = radius * SUPERSAMPLING
        turned = [
            (side / 2 + scale * (x * cosine - y * sine), side / 2 + scale * (x * sine + y * cosine)) for x, y in points
        ]
        pen.polygon(turned, fill=0 if number else 255)
    return mask.resize((2 * half, 2 * half), Image.Resampling.BOX)


def muted(avoid: list[RGB], rng: np.random.Generator) -> RGB:
    """A muted colour that stands off from every colour in `avoid`."""
    for _ in range(100):
        colour = rng.uniform(30, 235) + rng.uniform(-28, 28, 3)
        if all(np.linalg.norm(colour - other) >= MINIMUM_CONTRAST for other in avoid):
            return colour
    return np.array([128.0, 128.0, 128.0])


def background(width: int, height: int, avoid: list[RGB], rng: np.random.Generator) -> NDArray[np.float32]:
    """A plain, graded or textured ground, float32 [height, width, 3] in 0..255."""
    first = muted(avoid, rng)
    kind = rng.integers(5)
    if kind == 0:
        return np.broadcast_to(first, (height, width, 3)).astype(np.float32)
    # a second colour near the first, so that no blend of the two comes close to a thing's colour
    second = first + rng.uniform(-45, 45) + rng.uniform(-12, 12, 3)
    if any(np.linalg.norm(second - other) < MINIMUM_CONTRAST for other in avoid):
        second = first + rng.uniform(-12, 12, 3)
    angle = rng.uniform(0, 2 * math.pi)
    x = (np.arange(width, dtype=np.float32) / width - 0.5) * math.cos(angle)
    y = (np.arange(height, dtype=np.float32)[:, None] / height - 0.5) * math.sin(angle)
    if kind == 1:
        blend: NDArray[np.floating] = x + y + 0.5
    elif kind == 2:
        blend = 0.5 + 0.5 * np.sin((x + y) * (2 * math.pi * rng.uniform(3, 14)))
    else:
        cells = int(rng.integers(3, 16))
        coarse = Image.fromarray((rng.random((cells, cells)) * 255).astype(np.uint8))
        smooth = Image.Resampling.BILINEAR if kind == 3 else Image.Resampling.NEAREST
        blend = np.asarray(coarse.resize((width, height), smooth), dtype=np.float32) / 255
    blend = np.clip(blend, 0, 1)[..., None].astype(np.float32)
    return first.astype(np.float32) + (second - first).astype(np.float32) * blend


def places(scene: Scene, rng: np.random.Generator) -> list[tuple[float, float, float]]:
    """A centre and a radius (x, y, r) for every thing, inside the unit square and without overlap."""
    if scene.layout == "single":
        r = rng.uniform(0.13, 0.34)
        return [(rng.uniform(r + 0.04, 0.96 - r), rng.uniform(r + 0.04, 0.96 - r), r)]
    if scene.layout == "count":
        return scatter(len(scene.things), rng)
    r1, r2 = rng.uniform(0.11, 0.19, 2)
    apart = rng.uniform(r1 + r2 + 0.06, 0.94 - r1 - r2)
    along = rng.uniform(r1 + 0.03, 0.97 - r2 - apart)
    low, high = max(r1, r2) + 0.03, 0.97 - max(r1, r2)
    across = rng.uniform(low, high)
    other = float(np.clip(across + rng.uniform(-0.45, 0.45) * apart, low, high))
    spots = [(along, across, r1), (along + apart, other, r2)]
    return spots if scene.layout == "left" else [(y, x, r) for x, y, r in spots]


def scatter(number: int, rng: np.random.Generator) -> list[tuple[float, float, float]]:
    """`number` places of nearly one size without overlap."""
    while True:
        size = rng.uniform(0.09, 0.15)
        spots: list[tuple[float, float, float]] = []
        for _ in range(40):
            r = size * rng.uniform(0.9, 1.1)
            x, y = rng.uniform(r + 0.03, 0.97 - r, 2)
            if all(math.hypot(x - u, y - v) > r + s + 0.04 for u, v, s in spots):
                spots.append((x, y, r))
            if len(spots) == number:
                return spots


def random_size(rng: np.random.Generator, shortest: tuple[int, int] = (64, 120)) -> tuple[int, int]:
    """A width and a height whose shorter edge lies in `shortest` and whose aspect ratio is at most 3:2."""
    short = int(rng.integers(shortest[0], shortest[1] + 1))
    long = round(short * rng.uniform(1.0, 1.5))
    return (short, long) if rng.random() < 0.4 else (long, short)


def draw(
    scene: Scene, rng: np.random.Generator, size: tuple[int, int] | None = None, grain: float | None = None
) -> Image.Image:
    """Draw `scene` as an RGB picture of `size` (width, height) with noise of deviation `grain`, both random if None.

    Every thing lies inside the centred square, so that a centre crop loses none of them.
    """
    width, height = size or random_size(rng)
    short = min(width, height)
    left, top = (width - short) / 2, (height - short) / 2
    colours = [np.clip(np.array(PALETTE[thing.colour]) + rng.uniform(-14, 14, 3), 0, 255) for thing in scene.things]
    ground = background(width, height, colours, rng)
    picture = Image.fromarray(np.clip(ground, 0, 255).astype(np.uint8))
    for thing, colour, (x, y, r) in zip(scene.things, colours, places(scene, rng), strict=True):
        mask = stencil(thing.shape, r * short, rng.uniform(-0.2, 0.2))
        corner = round(left + x * short - mask.width / 2), round(top + y * short - mask.height / 2)
        picture.paste(tuple(int(level) for level in colour), corner, mask)
    return add_grain(picture, rng.uniform(0, 12) if grain is None else grain, rng)


def add_grain(picture: Image.Image, deviation: float, rng: np.random.Generator) -> Image.Image:
    """Add noise of a standard deviation in levels: the sum of two uniform draws, many times cheaper than a normal."""
    levels = np.asarray(picture)
    first, second = rng.integers(0, 256, (2, *levels.shape), dtype=np.uint8)
    noise = (first.astype(np.float32) + second - 255) * np.float32(deviation / TRIANGLE_DEVIATION)
    return Image.fromarray(np.clip(levels + noise, 0, 255).astype(np.uint8))
