"""A CLIP ViT-B/32 of real size against transformers: pixels to vectors, texts to vectors, both towers, both dtypes."""

import io
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import CLIPTokenizer

from encoder.engine import Engine
from encoder.graphs import proof
from encoder.settings import EngineSettings
from tests.support.checkpoints import VIT_B_32, oracle, unit, worst_cosine, write_clip
from tests.support.clip_vocab import clip_tokenizer_folder

TEXTS = [
    "a photo of a cat",
    "a red circle left of a blue square",
    "",
    "ein Bär, 日本語, 😀 and more",
    " ".join(["many words that do not fit"] * 30),
    *(f"picture number {i} of {'very ' * (i % 9)}ordinary things" for i in range(28)),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = write_clip(tmp_path_factory.mktemp("vit-b-32"), VIT_B_32)
    for file in clip_tokenizer_folder().iterdir():
        (path / file.name).write_bytes(file.read_bytes())
    return path


@pytest.fixture(scope="module")
def pictures() -> list[bytes]:
    rng = np.random.default_rng(3)
    encoded = []
    for index in range(33):
        height, width = (480, 640) if index % 3 else (200 + 7 * index, 330 - 5 * index)
        small = Image.fromarray(rng.integers(0, 256, (6, 8, 3), dtype=np.uint8))
        stream = io.BytesIO()
        small.resize((width, height), Image.Resampling.BICUBIC).save(stream, "PNG" if index % 4 == 0 else "JPEG")
        encoded.append(stream.getvalue())
    return encoded


@pytest.fixture(scope="module")
def expected_images(folder: Path, pictures: list[bytes]) -> Callable[[str], np.ndarray]:
    """transformers' vectors of the pictures, from pixels made by its own PIL processor or by the mode's golden rule."""
    model = oracle(folder)

    def vectors(mode: str) -> np.ndarray:
        if mode == "pil":
            from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

            images = [Image.open(io.BytesIO(data)).convert("RGB") for data in pictures]
            processor = CLIPImageProcessorPil.from_pretrained(folder)
            pixels = torch.from_numpy(np.stack(processor(images, return_tensors="np").pixel_values))
        else:  # the torch mode's pixels are held bit for bit against golden ones in tests/preprocess
            from encoder.preprocess.transform import ImageTransform
            from tests.support.checkpoints import PREPROCESSOR

            transform = ImageTransform.from_config(PREPROCESSOR, "torch")
            arrays = [np.asarray(Image.open(io.BytesIO(data)).convert("RGB")) for data in pictures]
            pixels = torch.from_numpy(transform.normalize(np.stack([transform.resize_crop(a) for a in arrays])))
        with torch.inference_mode():
            return model.visual_projection(model.vision_model(pixel_values=pixels).pooler_output).numpy()

    return vectors


@pytest.fixture(scope="module")
def expected_texts(folder: Path) -> np.ndarray:
    model, tokenizer = oracle(folder), CLIPTokenizer.from_pretrained(folder)
    tokens = tokenizer(TEXTS, padding=True, truncation=True, max_length=77, return_tensors="pt")
    with torch.inference_mode():
        pooled = model.text_model(input_ids=tokens.input_ids, attention_mask=tokens.attention_mask).pooler_output
        return model.text_projection(pooled).numpy()


KINDS = [
    (tower, dtype, runner)
    for dtype in ("float32", "bfloat16")
    for tower in ("vision", "text")
    for runner in ("eager", "openvino")
]


@pytest.fixture(scope="module", params=KINDS, ids="-".join)
def engine(request: pytest.FixtureRequest, folder: Path) -> Iterator[Engine]:
    tower, dtype, runner = request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(proof, "SLOWER_THAN_EAGER", 1e9)  # times must not decide here whether a bucket serves
        loaded = load(folder, tower, dtype, runner)
    yield loaded
    loaded.close()


def load(folder: Path, tower: str, dtype: str, runner: str) -> Engine:
    settings = {
        "model": str(folder),
        "tower": tower,
        "dtype": dtype,
        "runner": runner,
        "buckets": [1, 33],
        "text_lengths": [16],
    }
    return Engine.load(EngineSettings.model_validate(settings))


def prepared(engine: Engine, pictures: list[bytes]) -> list[object]:
    if engine.tower == "vision":
        return [engine.prepare_image(data) for data in pictures]
    return [engine.prepare_text(text) for text in TEXTS]


def test_vectors_equal_transformers(
    engine: Engine, pictures: list[bytes], expected_images: Callable[[str], np.ndarray], expected_texts: np.ndarray
) -> None:
    found = engine.forward(prepared(engine, pictures)).vectors
    expected = expected_images("torch") if engine.tower == "vision" else expected_texts
    if engine.info.compute_dtype == "float32":
        assert np.abs(unit(found) - unit(expected)).max() <= 1e-5
    else:
        assert worst_cosine(found, expected) >= 0.9995


def test_alone_or_among_33_is_the_same_vector(engine: Engine, pictures: list[bytes]) -> None:
    items = prepared(engine, pictures)
    together = engine.forward(items).vectors
    for index in (0, 4, 32):
        alone = engine.forward([items[index]]).vectors
        if engine.info.compute_dtype == "float32":
            assert np.abs(unit(alone) - unit(together[index : index + 1])).max() <= 1e-5
        else:
            assert worst_cosine(alone, together[index : index + 1]) >= 0.9999
    assert np.array_equal(engine.forward(items).vectors, together)


def test_every_bucket_was_captured_and_every_check_passed(engine: Engine) -> None:
    report = engine.report()
    wanted = "ready" if report.graphs[0].runner == "openvino" else "eager"
    assert [(graph.state, graph.reason) for graph in report.graphs if graph.state != wanted] == []
    assert report.self_checks and all(check.passed for check in report.self_checks)
    assert report.backend.name == "sdpa" and not any(name.startswith("fallback") for name in report.counters)


def test_pil_mode_equals_transformers_pil_processor(
    folder: Path, pictures: list[bytes], expected_images: Callable[[str], np.ndarray]
) -> None:
    settings = {"model": str(folder), "dtype": "float32", "runner": "eager", "preprocess": "pil", "buckets": [16]}
    engine = Engine.load(EngineSettings.model_validate(settings))
    found = engine.forward([engine.prepare_image(data) for data in pictures]).vectors
    assert np.abs(unit(found) - unit(expected_images("pil"))).max() <= 1e-5
