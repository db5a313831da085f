"""Files of every kind through a replica's core: the oracle's vector or the item's own error, and nothing else.

The oracle reads with Pillow, flattens by the stated policies in a few lines of its own, and goes on with transformers'
processor and model.
"""

import gc
import io
import json
import struct
from collections.abc import AsyncIterator
from random import Random
from types import FrameType, TracebackType

import numpy as np
import psutil
import pytest
import torch
from PIL import Image, ImageOps
from transformers import CLIPModel
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from deployments.service import EncoderCore
from deployments.settings import parse_pool_settings
from encoder.demo import demo_model_path
from encoder.engine import Engine
from encoder.errors import EncoderError
from encoder.settings import parse_engine_settings
from encoder.v1 import encoder_pb2 as pb
from tests.deployments.plain_server import IDENTITY, images
from tests.fuzz.corpus import pictures
from tests.fuzz.mutate import mutate
from tests.preprocess.pictures import file_of, photo

pytestmark = pytest.mark.filterwarnings("ignore")
QUICK = {"runner": "eager", "buckets": [1, 8], "threads": 1, "self_check": False, "dtype": "float32"}


@pytest.fixture
async def core() -> AsyncIterator[EncoderCore]:
    engine = Engine.load(parse_engine_settings({"model": "demo", "tower": "vision", "preprocess": "pil", **QUICK}))
    made = EncoderCore(engine, parse_pool_settings({"name": "vision-cpu", "engine": {}, "decode_threads": 2}), IDENTITY)
    yield made
    await made.close()


def oracle(files: list[bytes]) -> np.ndarray:
    processor = CLIPImageProcessorPil.from_pretrained(demo_model_path())
    model = CLIPModel.from_pretrained(demo_model_path(), attn_implementation="eager").eval()
    pixels = processor([flattened(data) for data in files], return_tensors="pt").pixel_values
    with torch.inference_mode():
        vectors = model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output).numpy()
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def flattened(data: bytes) -> Image.Image:
    image = Image.open(io.BytesIO(data))
    image.load()
    mode, transparent, adobe = image.mode, image.info.get("transparency"), "adobe" in image.info
    try:
        upright = ImageOps.exif_transpose(image)
    except struct.error:  # EXIF that cannot be read
        upright = image
    if mode.startswith("I;16"):
        grey = np.asarray(upright)
        levels = np.where(grey == transparent, 255, grey >> 8) if isinstance(transparent, int) else grey >> 8
        return Image.fromarray(levels.astype(np.uint8)).convert("RGB")
    if mode == "CMYK" and image.format == "JPEG" and not adobe:
        return Image.fromarray(255 - np.asarray(upright), mode="CMYK").convert("RGB")
    if mode in {"RGBA", "LA", "PA"} or transparent is not None:
        ground = Image.new("RGBA", upright.size, (255, 255, 255, 255))
        return Image.alpha_composite(ground, upright.convert("RGBA")).convert("RGB")
    return upright.convert("RGB")


async def test_every_kind_of_file_gives_the_oracles_vector(core: EncoderCore) -> None:
    files = list(pictures())
    answer = await core.encode_images(images(*files))
    assert [result.WhichOneof("outcome") for result in answer.results] == ["embedding"] * len(files)
    found = np.stack([np.frombuffer(result.embedding.values, "<f4") for result in answer.results])
    np.testing.assert_allclose(found, oracle(files), atol=2e-5)


async def test_good_files_among_broken_ones_keep_their_vectors(core: EncoderCore) -> None:
    rng, good = Random(11), [file_of(photo(40, 50, seed=n), name) for n, name in enumerate(("JPEG", "WEBP", "TIFF"))]
    broken = [mutate(rng, pictures()) for _ in range(60)]
    files = [*broken[:20], good[0], *broken[20:40], good[1], *broken[40:], good[2]]
    answer = await core.encode_images(images(*files))
    expected = iter(oracle(good))
    for data, result in zip(files, answer.results, strict=True):
        if data in good:
            np.testing.assert_allclose(np.frombuffer(result.embedding.values, "<f4"), next(expected), atol=2e-5)
        elif result.HasField("error"):
            assert result.error.code == 3 and "\n" not in result.error.message
    assert sum(result.HasField("error") for result in answer.results) > 15


async def test_the_same_picture_as_a_file_and_as_pixels_has_one_vector(core: EncoderCore) -> None:
    """Two routes in must not give two kinds of pixels."""
    request = images()
    for mode, channels in (("L", 1), ("RGB", 3), ("RGBA", 4)):
        image = photo(37, 53).convert(mode)
        if mode == "RGBA":
            image.putalpha(photo(37, 53, "L", seed=4))
        request.images.append(pb.Image(encoded=file_of(image, "PNG")))
        pixels = pb.RawPixels(data=image.tobytes(), height=37, width=53, channels=channels)
        request.images.append(pb.Image(pixels=pixels))
    answer = await core.encode_images(request)
    values = [np.frombuffer(result.embedding.values, "<f4") for result in answer.results]
    for file, raw in zip(values[::2], values[1::2], strict=True):
        np.testing.assert_allclose(file, raw, atol=1e-6)


async def test_the_second_identical_request_is_as_the_first(core: EncoderCore) -> None:
    files = list(pictures())[:9]
    first, second = [await core.encode_images(images(*files)) for _ in range(2)]
    for one, other in zip(first.results, second.results, strict=True):
        vectors = [np.frombuffer(result.embedding.values, "<f4") for result in (one, other)]
        np.testing.assert_allclose(*vectors, atol=1e-5)


async def test_get_model_returns_the_policies(core: EncoderCore) -> None:
    (tower,) = core.get_model(pb.GetModelRequest()).model.towers
    described = json.loads(tower.preprocessing_json)
    assert described["decode"] == {
        "version": 2, "apply_exif_orientation": True, "background": [255, 255, 255], "allow_truncated": False,
        "frame": "first", "deep_samples": "high byte", "colour_profiles": "ignored",
    }  # fmt: skip
    assert {"mode", "resize", "interpolation", "crop", "mean", "std", "rescale_factor"} <= described.keys()


REFUSED = {
    "a JPEG that is cut": file_of(photo(80, 90), "JPEG")[:900],
    "a PNG that is cut": file_of(photo(80, 90), "PNG")[:900],
    "a broken header": file_of(photo(80, 90), "PNG")[:25] + bytes(900),
    "a cut TIFF, in a worker": file_of(photo(80, 90), "TIFF")[:9000],
    "no picture": bytes(900),
    "no bytes": b"",
}


@pytest.mark.parametrize("name", REFUSED)
async def test_a_refused_picture_leaves_nothing_in_circles(core: EncoderCore, name: str) -> None:
    """Frames of a traceback that lead to their own error hold the picture's bytes until the collector comes by."""
    request = images(REFUSED[name], REFUSED[name])
    await core.encode_images(request)
    gc.collect()
    gc.disable()
    gc.set_debug(gc.DEBUG_SAVEALL)
    try:
        answer = await core.encode_images(request)
        gc.collect()
        held = [found for found in gc.garbage if isinstance(found, FrameType | TracebackType | EncoderError)]
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()
    assert [result.error.code for result in answer.results] == [3, 3]
    assert held == []


async def test_thousands_of_corrupt_pictures_leave_memory_as_it_was(core: EncoderCore) -> None:
    jpeg, webp = file_of(photo(200, 300), "JPEG"), file_of(photo(200, 300), "WEBP")
    corrupt = [jpeg[: len(jpeg) * part // 40] for part in range(4, 40)] + [webp[: len(webp) // 2]] * 4

    async def send(times: int) -> None:
        for _ in range(times):
            answer = await core.encode_images(images(*corrupt))
            assert all(result.error.code == 3 for result in answer.results)

    await send(10)
    before = psutil.Process().memory_info().rss
    await send(40)
    assert psutil.Process().memory_info().rss - before < 40 * 2**20
