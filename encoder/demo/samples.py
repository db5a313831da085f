"""Draw the dozen sample pictures and their labels: `python -m encoder.demo.samples [FOLDER]`."""

import argparse
import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from encoder.demo.draw import draw
from encoder.demo.scenes import Scene, Thing, plain_caption

QUALITY = 82  # of the lossy formats; keeps the dozen small


@dataclass(frozen=True)
class Sample:
    """One sample picture: what it shows, its size (width, height), its file's ending and its seed."""

    scene: Scene
    size: tuple[int, int]
    suffix: str
    seed: int

    @property
    def name(self) -> str:
        words = plain_caption(self.scene).split()
        return "-".join(word for word in words if word not in ("a", "an")) + self.suffix


def one(thing: str) -> Scene:
    return Scene("single", (Thing(*thing.split()),))


def many(number: int, thing: str) -> Scene:
    return Scene("count", (Thing(*thing.split()),) * number)


def left_of(first: str, second: str) -> Scene:
    return Scene("left", (Thing(*first.split()), Thing(*second.split())))


def above(first: str, second: str) -> Scene:
    return Scene("above", (Thing(*first.split()), Thing(*second.split())))


SAMPLES = (
    Sample(left_of("red circle", "blue square"), (640, 480), ".jpg", 1),
    Sample(left_of("blue square", "red circle"), (640, 480), ".jpg", 2),
    Sample(above("green triangle", "yellow star"), (480, 640), ".jpg", 3),
    Sample(above("yellow star", "green triangle"), (500, 375), ".webp", 4),
    Sample(left_of("white heart", "black diamond"), (320, 240), ".png", 5),
    Sample(above("purple cross", "orange circle"), (333, 500), ".webp", 6),
    Sample(one("purple star"), (640, 427), ".jpg", 7),
    Sample(one("orange heart"), (256, 256), ".png", 8),
    Sample(one("black ring"), (225, 300), ".webp", 9),
    Sample(many(3, "green triangle"), (640, 480), ".webp", 10),
    Sample(many(2, "white circle"), (200, 150), ".png", 11),
    Sample(many(4, "blue cross"), (120, 90), ".jpg", 12),
)


def draw_samples(folder: Path) -> None:
    """Write the sample pictures and `labels.json` (file name to caption, in order) to `folder`."""
    folder.mkdir(parents=True, exist_ok=True)
    for sample in SAMPLES:
        # a lossless picture takes no grain, which would not compress
        grain = 0.0 if sample.suffix == ".png" else 4.0
        picture = draw(sample.scene, np.random.default_rng(sample.seed), sample.size, grain)
        picture.save(folder / sample.name, quality=QUALITY)
    labels = {sample.name: plain_caption(sample.scene) for sample in SAMPLES}
    (folder / "labels.json").write_text(json.dumps(labels, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description="Draw the sample pictures and their labels.")
    parser.add_argument("folder", type=Path, nargs="?", default=Path(__file__).parent / "pictures")
    draw_samples(parser.parse_args().folder)


if __name__ == "__main__":
    main()
