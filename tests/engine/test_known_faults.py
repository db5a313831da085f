"""Faults that services of this kind are known for, each by the smallest input that shows it; what other files of tests
hold already is not here.
"""

import json
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from google.protobuf.message import DecodeError
from PIL import Image
from transformers import AutoTokenizer, CLIPModel

from deployments.service import EncoderCore
from deployments.settings import parse_pool_settings
from encoder.attention.backend import AttentionCall
from encoder.attention.dispatch import Dispatcher
from encoder.attention.hf import attending
from encoder.attention.registry import backend_class
from encoder.attention.resolve import ResolvedBackend
from encoder.attention.sdpa import SdpaAttention
from encoder.demo import demo_model_path
from encoder.engine import Engine
from encoder.errors import InvalidText
from encoder.models.checkpoint import find_checkpoint
from encoder.models.tower import load_tower
from encoder.preprocess.text import MAX_CHARACTERS, TextPipeline
from encoder.preprocess.transform import ImageTransform
from encoder.settings import parse_engine_settings
from encoder.v1 import encoder_pb2 as pb
from tests.deployments.plain_server import IDENTITY, images
from tests.parity.pictures import drawn
from tests.parity.registry import all_cases
from tests.preprocess.pictures import file_of, photo

QUICK = {"runner": "eager", "buckets": [1, 4], "threads": 1, "self_check": False, "dtype": "float32"}


def load(model: str | Path = "demo", **settings: object) -> Engine:
    return Engine.load(parse_engine_settings({"model": str(model), **QUICK, **settings}))


def edited(tmp_path: Path, **changes: object) -> Path:
    """A copy of the demo's checkpoint with other settings in its text and vision halves."""
    folder = Path(shutil.copytree(demo_model_path(), tmp_path / "model"))
    config = json.loads((folder / "config.json").read_text())
    for half in ("text_config", "vision_config"):
        config[half].update(changes)
    (folder / "config.json").write_text(json.dumps(config))
    return folder


class TestPictures:
    def test_squash_takes_a_3_to_1_picture_whole(self) -> None:
        """A resize mode that is ignored shows on no square picture."""
        config = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 64, "width": 64}}
        image = photo(60, 180)
        found = ImageTransform.from_config(config, "pil").resize_crop(np.asarray(image))
        expected = np.asarray(image.resize((64, 64), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
        assert np.array_equal(found, expected)
        clip = {"image_processor_type": "CLIPImageProcessor", "size": {"shortest_edge": 64}, "crop_size": 64}
        assert not np.array_equal(found, ImageTransform.from_config(clip, "pil").resize_crop(np.asarray(image)))

    def test_bicubic_is_clamped_between_its_two_passes(self) -> None:
        """Black and white edges overshoot: rounding to uint8 between the passes is part of the oracle's arithmetic."""
        edges = np.where((np.indices((90, 70)) // 7).sum(axis=0) % 2, 255, 0).astype(np.uint8)
        pixels = np.stack([edges] * 3, axis=2)
        config = {"image_processor_type": "SiglipImageProcessor", "size": {"height": 33, "width": 41}}
        expected = np.asarray(Image.fromarray(pixels).resize((41, 33), Image.Resampling.BICUBIC)).transpose(2, 0, 1)
        assert np.array_equal(ImageTransform.from_config(config, "pil").resize_crop(pixels), expected)
        tensor = torch.from_numpy(pixels).permute(2, 0, 1)[None]
        library = torch.nn.functional.interpolate(tensor, size=(33, 41), mode="bicubic", antialias=True)[0].numpy()
        assert np.array_equal(ImageTransform.from_config(config, "torch").resize_crop(pixels), library)

    async def test_a_broken_png_and_a_gif_stop_nothing(self) -> None:
        """After either, the next picture is answered and the health probe passes."""
        core = EncoderCore(load(), parse_pool_settings({"name": "vision-cpu", "engine": {}}), IDENTITY)
        broken = file_of(photo(40, 40), "PNG")[:700]
        try:
            for bad in (broken, file_of(photo(20, 20, "P"), "GIF")[:90], b"", file_of(photo(1, 1), "PNG")[:40]):
                first = await core.encode_images(images(bad))
                assert first.results[0].error.code == 3
                after = await core.encode_images(images(file_of(photo(1, 1), "PNG"), file_of(photo(9, 9, "P"), "GIF")))
                assert all(result.HasField("embedding") for result in after.results)
                await core.check_health()
        finally:
            await core.close()

    @pytest.mark.parametrize(("side", "patches"), [(546, 39), (602, 43)])
    def test_grids_whose_interpolation_factor_is_no_round_number(self, side: int, patches: int, tmp_path: Path) -> None:
        case = all_cases()["dinov2-b-14"]
        folder = case.write(tmp_path / "model", "small")
        processor = json.loads((folder / "preprocessor_config.json").read_text())
        processor |= {"size": {"shortest_edge": side}, "crop_size": {"height": side, "width": side}}
        (folder / "preprocessor_config.json").write_text(json.dumps(processor))
        picture = drawn(1)[0]
        engine = load(folder)
        item = engine.prepare_image(picture.data)
        assert engine.grid_of(item) == (patches, patches)
        expected = case.oracle(folder, case.inputs(folder, "torch", [picture.rgb])).vectors
        assert abs(engine.forward([item]).vectors - expected).max() <= 1e-4
        engine.close()


class TestActivation:
    def test_gelu_and_quick_gelu_are_the_checkpoints_word(self, tmp_path: Path) -> None:
        picture, vectors = file_of(photo(70, 90), "PNG"), {}
        for name in ("gelu", "quick_gelu"):
            folder = edited(tmp_path / name, hidden_act=name)
            engine = load(folder)
            item = engine.prepare_image(picture)
            vectors[name] = engine.forward([item]).vectors
            pixels = torch.from_numpy(engine._tower.transform.normalize(item[None]))  # type: ignore[attr-defined]
            clip = CLIPModel.from_pretrained(folder, attn_implementation="eager").eval()
            with torch.inference_mode():
                expected = clip.visual_projection(clip.vision_model(pixel_values=pixels).pooler_output).numpy()
            np.testing.assert_allclose(vectors[name], expected, atol=2e-5)
            engine.close()
        assert abs(vectors["gelu"] - vectors["quick_gelu"]).max() > 1e-3


class TestPooling:
    @pytest.mark.parametrize("name", ["aimv2-l-14-native", "internvit-300m"])
    def test_a_mean_over_tokens_is_not_rounded_to_the_towers_dtype(self, name: str, tmp_path: Path) -> None:
        """Scores were lost where a mean over many tokens was kept in half precision."""
        case = all_cases()[name]
        settings = parse_engine_settings({"model": str(case.write(tmp_path, "small")), **QUICK, **case.settings})
        tower: Any = load_tower(find_checkpoint(settings.model, offline=True), settings)
        tower.module.bfloat16()
        with (
            torch.inference_mode(),
            attending(Dispatcher(ResolvedBackend("sdpa", "platform", "a test", SdpaAttention.capabilities))),
        ):
            inputs = tower.collate(tower.golden_items())
            vectors, tokens = tower.forward({key: value.bfloat16() for key, value in inputs.items()})
        assert tokens.dtype is torch.bfloat16 and vectors.dtype is torch.float32
        expected = tokens.double().mean(dim=1)
        assert (vectors - expected).abs().max() <= 1e-6 * expected.abs().max()


class TestMasks:
    def test_what_pads_a_text_is_never_looked_at(self) -> None:
        """Padding of a causal tower stands after the end, so that its vector must be the same without it."""
        engine = load(tower="text")
        tower: Any = engine._tower
        item = engine.prepare_text("a red circle left of a blue square")
        length = len(item.input_ids)
        with torch.inference_mode(), attending(engine._dispatcher):
            alone = tower.forward(tower.collate([item])).vectors
            padded = tower.collate([item], length=32)
            vectors = [tower.forward(padded).vectors]
            for filler in (0, 5, int(item.input_ids[-1])):  # the last is the end-of-text token, once more
                padded["input_ids"][:, length:] = filler
                vectors.append(tower.forward(padded).vectors)
        assert length < 32
        assert max((found - alone).abs().max() for found in vectors) <= 1e-6
        engine.close()

    @pytest.mark.parametrize("name", ["reference", "sdpa"])
    def test_boolean_and_additive_masks_of_one_meaning_agree(self, name: str) -> None:
        generator = torch.Generator().manual_seed(2)
        query, key, value = (torch.randn(2, 2, 9, 64, generator=generator) for _ in range(3))
        seen = torch.rand(2, 1, 9, 9, generator=generator) > 0.4
        seen[..., 0] = True
        additive = torch.zeros(seen.shape).masked_fill(~seen, float("-inf"))
        attend = backend_class(name)().attend
        found = [attend(AttentionCall(query, key, value, 0.125, mask)) for mask in (seen, additive)]
        assert (found[0] - found[1]).abs().max() <= 1e-6
        inverted = attend(AttentionCall(query, key, value, 0.125, ~seen))
        assert (found[0] - inverted).abs().max() > 0.1

    @pytest.mark.parametrize("name", ["reference", "sdpa"])
    def test_a_finite_bias_is_added_and_not_taken_for_true(self, name: str) -> None:
        generator = torch.Generator().manual_seed(3)
        query, key, value = (torch.randn(1, 2, 7, 64, generator=generator) for _ in range(3))
        bias = torch.randn(1, 2, 7, 7, generator=generator)
        found = backend_class(name)().attend(AttentionCall(query, key, value, 0.125, bias))
        weights = torch.softmax(query @ key.transpose(-1, -2) * 0.125 + bias, dim=-1)
        assert (found - weights @ value).abs().max() <= 1e-5


@pytest.fixture(scope="module")
def demo_text() -> TextPipeline:
    return TextPipeline.from_folder(demo_model_path(), 32)


@pytest.fixture
async def text_core() -> AsyncIterator[EncoderCore]:
    core = EncoderCore(load(tower="text"), parse_pool_settings({"name": "vision-cpu", "engine": {}}), IDENTITY)
    yield core
    await core.close()


class TestTexts:
    async def test_a_long_sentence_is_cut_and_says_so_or_is_refused(self, text_core: EncoderCore) -> None:
        """44 words need not fit: words are no tokens."""
        sentence = " ".join(["a red circle left of a blue square and"] * 5)[:200]
        tokenizer = AutoTokenizer.from_pretrained(str(demo_model_path()), local_files_only=True)
        count = len(tokenizer(sentence)["input_ids"])
        answer = await text_core.encode_text(pb.EncodeTextRequest(texts=[sentence, "a red circle"]))
        assert count > 32 and answer.results[0].token_count == count
        assert [result.truncated for result in answer.results] == [True, False]
        options = pb.EncodeOptions(text_overflow=pb.TEXT_OVERFLOW_REFUSE)
        refused = await text_core.encode_text(pb.EncodeTextRequest(texts=[sentence, "a red circle"], options=options))
        assert refused.results[0].error.code == 3 and refused.results[1].HasField("embedding")

    async def test_strange_texts_are_answered_as_the_tokenizer_reads_them(self, text_core: EncoderCore) -> None:
        texts = [
            "",
            " ",
            "\0",
            "\x01\x1b\x7f",
            "👩‍👩‍👧🇩🇪",
            "مرحبا שלום",
            "e\u0301" * 40,
            "\u202eabc",
            "\ufffe",
            "\r\n\t",
        ]
        answer = await text_core.encode_text(pb.EncodeTextRequest(texts=texts))
        assert all(result.HasField("embedding") for result in answer.results)
        tokenizer = AutoTokenizer.from_pretrained(str(demo_model_path()), local_files_only=True)
        assert [result.token_count for result in answer.results] == [len(tokenizer(one)["input_ids"]) for one in texts]

    async def test_a_megabyte_is_refused_beside_its_neighbours(self, text_core: EncoderCore) -> None:
        answer = await text_core.encode_text(pb.EncodeTextRequest(texts=["x" * 1_000_000, "a red circle"]))
        assert answer.results[0].error.code == 3 and "over the limit of" in answer.results[0].error.message
        assert answer.results[1].HasField("embedding")

    @pytest.mark.parametrize("unit", ["x", "a ", "😀", "e\u0301", "the quick brown fox ", "\n", "."])
    def test_the_longest_text_is_cut_as_the_tokenizer_cuts_it(self, demo_text: TextPipeline, unit: str) -> None:
        text = (unit * MAX_CHARACTERS)[:MAX_CHARACTERS]
        tokenizer = AutoTokenizer.from_pretrained(str(demo_model_path()), local_files_only=True)
        found = demo_text.encode(text)
        assert found.input_ids == tokenizer(text, truncation=True, max_length=32)["input_ids"]
        with pytest.raises(InvalidText, match="over the limit"):
            demo_text.encode(text + "x")

    def test_a_lone_surrogate_cannot_arrive(self) -> None:
        with pytest.raises((UnicodeEncodeError, ValueError)):
            pb.EncodeTextRequest(texts=["\ud800"]).SerializeToString()
        wire = pb.EncodeTextRequest(texts=["abc"]).SerializeToString().replace(b"abc", b"\xed\xa0\x80")
        with pytest.raises((DecodeError, UnicodeDecodeError)):
            pb.EncodeTextRequest.FromString(wire)
