"""Pictures that int8 is calibrated on: those of a folder, or drawn ones."""

import hashlib
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image

from encoder.errors import InvalidImage, InvalidInput
from encoder.graphs.runner import Calibration

# Measured on the demo model: with four pictures the worst of others fell to cosine 0.978, with a dozen to 0.999.
FEWEST_PICTURES = 16
MOST_PICTURES = 256
SUFFIXES = {".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp", ".tif", ".tiff", ".avif"}


def calibration_of(folder: Path | None, prepare: Callable[[bytes], np.ndarray]) -> Calibration:
    """The first MOST_PICTURES of a folder by name, or drawn ones; `prepare` makes a file's content an item.

    Raises InvalidInput for a folder with too few pictures, or with one that cannot be read.
    """
    if folder is None:
        return Calibration("drawn", lambda: [prepare(picture) for picture in _drawn()])
    files = _files(folder)
    digest = hashlib.sha256()
    for file in files:
        digest.update(file.read_bytes())
    return Calibration(digest.hexdigest()[:16], lambda: [_prepared(file, prepare) for file in files])


def _drawn() -> list[bytes]:
    """Scenes of the demo model's world, as PNG."""
    from encoder.demo.draw import draw
    from encoder.demo.scenes import training_scenes

    rng = np.random.default_rng(0)
    return [_as_png(draw(scene, rng)) for scene in training_scenes(rng, pairs=4, singles=24, counts=8)]


def _as_png(picture: Image.Image) -> bytes:
    stream = io.BytesIO()
    picture.save(stream, "PNG")
    return stream.getvalue()


def _files(folder: Path) -> list[Path]:
    try:
        found = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES and path.is_file())
    except OSError as error:
        raise InvalidInput(f"calibration folder {folder}: {error.strerror}: name a folder of pictures") from None
    if len(found) < FEWEST_PICTURES:
        raise InvalidInput(
            f"calibration folder {folder} holds {len(found)} pictures, int8 needs at least {FEWEST_PICTURES}: "
            "put some hundred typical ones there"
        )
    return found[:MOST_PICTURES]


def _prepared(file: Path, prepare: Callable[[bytes], np.ndarray]) -> np.ndarray:
    try:
        return prepare(file.read_bytes())
    except InvalidImage as error:
        raise InvalidInput(f"calibration picture {file.name}: {error}: take it out of the folder") from None
