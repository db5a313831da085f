"""The demo checkpoint under transformers: accurate on pictures it never saw, and ruined without its mask."""

import json

import pytest
import torch
from PIL import Image
from transformers import CLIPModel, CLIPTextModelWithProjection, CLIPTokenizer, CLIPVisionModelWithProjection
from transformers.models.clip import modeling_clip
from transformers.models.clip.image_processing_pil_clip import CLIPImageProcessorPil

from encoder.demo import demo_labels, demo_model_path, demo_pictures
from encoder.demo.evaluate import embed_pictures, held_out_relations, held_out_singles
from encoder.demo.export import write_card
from encoder.demo.pixels import to_pixels
from encoder.demo.scenes import THINGS, with_article

SEED = 7_654_321  # neither training's nor the model card's

Relations = tuple[torch.Tensor, list[list[str]]]


@pytest.fixture(scope="module")
def relations(model: CLIPModel) -> Relations:
    """Embeddings of 240 held-out pictures of two things [240, D], and four captions each, the first one true."""
    pictures, captions = held_out_relations(240, SEED)
    return embed_pictures(model, pictures), [nine[:4] for nine in captions]


def text_rows(model: CLIPModel, tokenizer: CLIPTokenizer, texts: list[str], pad_to: int | None = None) -> torch.Tensor:
    """Unit embeddings by transformers itself; `pad_to` pads every text to that length, None pads nothing at all."""
    padding = "max_length" if pad_to else False
    rows = tokenizer(texts, padding=padding, max_length=pad_to).input_ids
    out = torch.empty(len(texts), model.config.projection_dim)
    for length in {len(row) for row in rows}:  # texts of one length need no padding beside each other
        members = [index for index, row in enumerate(rows) if len(row) == length]
        ids = torch.tensor([rows[index] for index in members])
        out[members] = model.get_text_features(ids).pooler_output
    return torch.nn.functional.normalize(out, dim=-1)


def relations_right(model: CLIPModel, tokenizer: CLIPTokenizer, relations: Relations, pad_to: int | None) -> float:
    images, captions = relations
    with torch.inference_mode():
        rows = text_rows(model, tokenizer, [text for four in captions for text in four], pad_to)
    scores = torch.einsum("nd,nkd->nk", images, rows.view(len(captions), 4, -1))
    return float((scores[:, 0] > scores[:, 1:].amax(1) + 1e-6).float().mean())


def test_single_things_are_named_among_all_sixty_four(model: CLIPModel, tokenizer: CLIPTokenizer) -> None:
    scenes, pictures = held_out_singles(3, SEED)
    with torch.inference_mode():
        labels = text_rows(model, tokenizer, [with_article(thing) for thing in THINGS], pad_to=16)
    best = (embed_pictures(model, pictures) @ labels.T).argmax(1).tolist()
    right = [THINGS[index] == scene.things[0] for index, scene in zip(best, scenes, strict=True)]
    assert sum(right) / len(right) >= 0.95


@pytest.mark.parametrize("pad_to", [None, 32])
def test_relations_are_read(
    model: CLIPModel, tokenizer: CLIPTokenizer, relations: Relations, pad_to: int | None
) -> None:
    assert relations_right(model, tokenizer, relations, pad_to) >= 0.85


@pytest.mark.parametrize("pad_to", [None, 32])
def test_without_its_mask_the_text_tower_is_ruined(
    model: CLIPModel,
    tokenizer: CLIPTokenizer,
    relations: Relations,
    pad_to: int | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(modeling_clip, "create_causal_mask", lambda **_: None)  # eager attention then masks nothing
    # Without padding only the causal part is lost: from all right to about three in four.
    assert relations_right(model, tokenizer, relations, pad_to) < (0.6 if pad_to else 0.85)


def test_sample_pictures_are_labelled_right(model: CLIPModel, tokenizer: CLIPTokenizer) -> None:
    labels = demo_labels()
    with torch.inference_mode():
        rows = text_rows(model, tokenizer, labels, pad_to=16)
    best = (embed_pictures(model, [Image.open(path) for path in demo_pictures()]) @ rows.T).argmax(1)
    assert [labels[index] for index in best.tolist()] == labels


def test_each_tower_loads_alone_and_agrees(model: CLIPModel, tokenizer: CLIPTokenizer) -> None:
    ids = tokenizer(["a red ring", "two blue stars"], padding=True, return_tensors="pt").input_ids
    pixels = torch.rand(2, 3, 64, 64, generator=torch.Generator().manual_seed(0))
    text, lost_text = CLIPTextModelWithProjection.from_pretrained(demo_model_path(), output_loading_info=True)
    vision, lost_vision = CLIPVisionModelWithProjection.from_pretrained(demo_model_path(), output_loading_info=True)
    assert not lost_text["missing_keys"]
    assert not lost_vision["missing_keys"]
    with torch.inference_mode():
        torch.testing.assert_close(text.eval()(ids).text_embeds, model.get_text_features(ids).pooler_output)
        torch.testing.assert_close(vision.eval()(pixels).image_embeds, model.get_image_features(pixels).pooler_output)


def test_weights_are_float32_that_float16_holds_exactly() -> None:
    loaded = CLIPModel.from_pretrained(demo_model_path())
    for name, weight in loaded.named_parameters():
        assert weight.dtype == torch.float32, name
        assert torch.equal(weight, weight.half().float()), name


def test_the_folder_is_small_and_complete() -> None:
    files = {path.name: path.stat().st_size for path in demo_model_path().iterdir()}
    assert sum(files.values()) <= 5_000_000
    assert set(files) == {
        "README.md",
        "config.json",
        "merges.txt",
        "metrics.json",
        "model.safetensors",
        "preprocessor_config.json",
        "special_tokens_map.json",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
    }


def test_preprocessing_is_what_the_config_says() -> None:
    processor = CLIPImageProcessorPil.from_pretrained(demo_model_path())
    for path in demo_pictures():
        picture = Image.open(path).convert("RGB")
        expected = processor(picture, do_rescale=False, do_normalize=False, return_tensors="np").pixel_values[0]
        apart = (to_pixels(picture, 64).float() - torch.as_tensor(expected).float()).abs()
        assert apart.max() <= 1  # Pillow and torch round a resize differently


def test_the_card_says_what_was_measured(tmp_path) -> None:  # type: ignore[no-untyped-def]
    for name in ("metrics.json", "config.json"):
        (tmp_path / name).write_bytes((demo_model_path() / name).read_bytes())
    write_card(tmp_path)
    assert (tmp_path / "README.md").read_text() == (demo_model_path() / "README.md").read_text()
    accuracy = json.loads((tmp_path / "metrics.json").read_text())["accuracy"]
    assert accuracy["singles"] >= 0.95
    assert accuracy["relations"] >= 0.85
    assert accuracy["relations_unmasked_padded"] < 0.6
    assert accuracy["relations_unmasked"] < 0.8
