"""Mllama's pictures: fitted into a canvas of whole tiles with their own proportions, then cut into those tiles."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from encoder.errors import CheckpointError
from encoder.preprocess.processor_config import HALF, read_processor_settings
from encoder.preprocess.transform import ImageTransform, Mode


@dataclass(frozen=True)
class TiledPicture:
    """uint8 [rows * columns, 3, side, side], row by row; where the picture ends within a tile, it is black."""

    tiles: np.ndarray
    rows: int
    columns: int


@dataclass(frozen=True)
class TileTransform:
    """The image processor of one checkpoint. Thread-safe."""

    pixels: ImageTransform
    side: int
    most: int

    @cached_property
    def arrangements(self) -> list[tuple[int, int]]:
        """All (rows, columns) of up to `most` tiles; a picture's aspect ratio id is its place here, from 1."""
        counts = range(1, self.most + 1)
        return [(rows, columns) for rows in counts for columns in counts if rows * columns <= self.most]

    def ratio_id(self, picture: TiledPicture) -> int:
        """By which the model looks up its embeddings of tiles."""
        return self.arrangements.index((picture.rows, picture.columns)) + 1

    def arrangement(self, height: int, width: int) -> tuple[int, int]:
        """The canvas that enlarges a picture least, or, where all are too small, shrinks it least; of equals the one
        with the fewest tiles. As `get_optimal_tiled_canvas` of transformers 5.24."""

        def scale(canvas: tuple[int, int]) -> float:
            return min(canvas[0] * self.side / height, canvas[1] * self.side / width)

        enlarging = [canvas for canvas in self.arrangements if scale(canvas) >= 1]
        chosen = min(map(scale, enlarging)) if enlarging else max(map(scale, self.arrangements))
        return min((c for c in self.arrangements if scale(c) == chosen), key=lambda canvas: canvas[0] * canvas[1])

    def fitted(self, height: int, width: int, rows: int, columns: int) -> tuple[int, int]:
        """(height, width) of the picture within its canvas; no side is enlarged past a tile."""
        within_height = min(max(height, self.side), rows * self.side)
        within_width = min(max(width, self.side), columns * self.side)
        by_height, by_width = within_height / height, within_width / width
        if by_width < by_height:
            return min(math.floor(height * by_width) or 1, within_height), within_width
        return within_height, min(math.floor(width * by_height) or 1, within_width)

    def cut(self, pixels: np.ndarray) -> TiledPicture:
        """RGB uint8 [h, w, 3] in tiles."""
        height, width = pixels.shape[:2]
        rows, columns = self.arrangement(height, width)
        new_height, new_width = self.fitted(height, width, rows, columns)
        canvas = np.zeros((rows * self.side, columns * self.side, 3), dtype=np.uint8)
        canvas[:new_height, :new_width] = self.pixels.resized(pixels, new_height, new_width)
        tiles = canvas.reshape(rows, self.side, columns, self.side, 3).transpose(0, 2, 4, 1, 3)
        return TiledPicture(np.ascontiguousarray(tiles).reshape(rows * columns, 3, self.side, self.side), rows, columns)

    def describe(self) -> dict[str, Any]:
        """JSON-ready; transforms that describe themselves alike give the same numbers."""
        settings = self.pixels.settings
        return {
            "mode": self.pixels.mode,
            "resize": {"rule": "tiles", "side": self.side, "most": self.most},
            "interpolation": settings.filter_name,
            "antialias": True,
            "rescale_factor": settings.rescale_factor,
            "mean": None if settings.mean is None else list(settings.mean),
            "std": None if settings.std is None else list(settings.std),
        }


def tile_transform(config: Mapping[str, Any], mode: Mode, *, side: int, most: int) -> TileTransform:
    """Of a MllamaImageProcessor's settings, for a model with such tiles.

    Raises CheckpointError that names the setting which does not fit.
    """
    left = {key: value for key, value in config.items() if value is not None}
    name = str(left.pop("image_processor_type", None))
    if not name.startswith("MllamaImageProcessor"):
        raise CheckpointError(f"image processor: type {name} is not MllamaImageProcessor, which this model takes")
    for key in ("do_resize", "do_pad"):
        if left.pop(key, True) is not True:
            raise CheckpointError(f"image processor: {key}=false is not supported, tiles need whole sides")
    size, tiles = left.pop("size", {"height": 224, "width": 224}), left.pop("max_image_tiles", 4)
    if size != {"height": side, "width": side}:
        raise CheckpointError(f"image processor: size={size!r} does not fit the model, whose tiles have {side} pixels")
    if tiles != most:
        raise CheckpointError(f"image processor: max_image_tiles={tiles!r} does not fit the model, which takes {most}")
    # The common reader knows no such class: here CLIP stands for one that neither resizes nor crops by itself.
    plain = {"image_processor_type": "CLIPImageProcessor", "do_resize": False, "do_center_crop": False}
    defaults = {"resample": 2, "image_mean": HALF, "image_std": HALF}
    settings = read_processor_settings(defaults | left | plain)
    return TileTransform(ImageTransform.without_size(settings, mode), side, most)
