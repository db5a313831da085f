"""The preprocess mode `reduced`: JPEGs much larger than the model's input are decoded at a part of their scale.

libjpeg-turbo leaves out the fine frequencies that the resize would average away: a picture of twelve megapixels takes a
quarter of the time. The pixels are not those of any oracle, so the mode is never on by itself, is part of the
fingerprint, and its drift is measured at start.
"""

import io
from typing import Any

import numpy as np
from PIL import Image

from encoder.errors import Unsupported
from encoder.golden import golden_pictures
from encoder.models.halves import PictureTower, TextTower
from encoder.models.tower import Tower
from encoder.preprocess.decode import decode_image
from encoder.preprocess.isolation import Decoder

# No side gets shorter than so many times what it is resized to: what is left for the antialiasing resize to do.
MARGIN = 2
# How much larger than that the pictures are by which the drift is measured.
DRIFT_SCALE = 4


def reduced_side(tower: Tower[Any]) -> int:
    """The shortest side of a reduced picture; 0 for texts.

    Raises Unsupported for a model whose pictures have many sizes, or are not resized at all.
    """
    if isinstance(tower, TextTower):
        return 0
    resize = tower.transform.settings.resize if isinstance(tower, PictureTower) else None
    if resize is None:
        raise Unsupported(
            f"preprocess reduced: the {tower.spec.family} family does not resize to one size: use preprocess torch"
        )
    return MARGIN * max(resize.height, resize.width)


def drift_items(tower: PictureTower, decoder: Decoder) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """Large JPEGs by formula as the tower's items: decoded whole, and by the decoder's policy."""
    side = DRIFT_SCALE * decoder.policy.reduced_side
    files = [_as_jpeg(picture) for picture in golden_pictures(side * 3 // 4, side)]
    whole = [tower.prepare(decode_image(file)) for file in files]
    return whole, [tower.prepare(decode_image(file, decoder.limits, decoder.policy)) for file in files]


def _as_jpeg(levels: np.ndarray) -> bytes:
    """uint8 [3, h, w] at quality 90."""
    stream = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(levels.transpose(1, 2, 0))).save(stream, "JPEG", quality=90)
    return stream.getvalue()
