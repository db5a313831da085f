"""The demo's tokenizer: any text in, at most a context of tokens out, the same by every loader."""

import json

import pytest
from tokenizers import Tokenizer
from transformers import CLIPTokenizer

from encoder.demo import demo_model_path
from encoder.demo.scenes import THINGS
from encoder.demo.tokenizer import CONTEXT, build_tokenizer

TEXTS = ["", " ", "a red circle", "🦊🏽 and 漢字, ünïcödé!", "\x00\t\n", "x" * 5000, "red " * 200, "A Red CIRCLE's 42"]


@pytest.mark.parametrize("text", TEXTS)
def test_any_text_becomes_start_tokens_end(tokenizer: CLIPTokenizer, text: str) -> None:
    ids = tokenizer(text, truncation=True).input_ids
    assert 2 <= len(ids) <= CONTEXT
    assert ids[0] == tokenizer.bos_token_id
    assert ids[-1] == tokenizer.eos_token_id
    assert tokenizer.eos_token_id not in ids[:-1]  # which is the unknown token too: nothing was unknown


def test_long_texts_keep_their_end_token_at_the_last_place(tokenizer: CLIPTokenizer) -> None:
    ids = tokenizer("red " * 200, truncation=True).input_ids
    assert len(ids) == CONTEXT
    assert ids[-1] == tokenizer.eos_token_id


def test_known_words_are_one_token_each(tokenizer: CLIPTokenizer) -> None:
    for thing in THINGS:
        assert len(tokenizer(f"three {thing.plural} to the left of an {thing}").input_ids) == 2 + 3 + 4 + 3


def test_bytes_survive_the_round_trip(tokenizer: CLIPTokenizer) -> None:
    text = "🦊 ünï 漢字"
    assert tokenizer.decode(tokenizer(text).input_ids, skip_special_tokens=True) == text


def test_padding_is_a_token_of_its_own(tokenizer: CLIPTokenizer) -> None:
    assert len({tokenizer.pad_token_id, tokenizer.eos_token_id, tokenizer.bos_token_id}) == 3
    short, _ = tokenizer(["a ring", "a red ring above a blue star"], padding=True).input_ids
    assert short.count(tokenizer.eos_token_id) == 1
    assert short[-1] == tokenizer.pad_token_id


@pytest.mark.parametrize("text", TEXTS)
def test_every_loader_gives_the_same_tokens(tokenizer: CLIPTokenizer, text: str) -> None:
    folder = demo_model_path()
    expected = tokenizer(text, truncation=True).input_ids
    assert Tokenizer.from_file(str(folder / "tokenizer.json")).encode(text).ids == expected
    vocab = json.loads((folder / "vocab.json").read_text())
    merges = [tuple(line.split()) for line in (folder / "merges.txt").read_text().splitlines()[1:]]
    special = json.loads((folder / "special_tokens_map.json").read_text())
    plain = CLIPTokenizer(vocab=vocab, merges=merges, model_max_length=CONTEXT, **special)
    assert plain(text, truncation=True).input_ids == expected
    assert build_tokenizer()(text, truncation=True).input_ids == expected


def test_ids_agree_with_the_text_config(tokenizer: CLIPTokenizer) -> None:
    text = json.loads((demo_model_path() / "config.json").read_text())["text_config"]
    assert text["vocab_size"] == len(tokenizer)
    assert text["max_position_embeddings"] == tokenizer.model_max_length == CONTEXT
    for name in ("bos", "eos", "pad"):
        assert text[f"{name}_token_id"] == getattr(tokenizer, f"{name}_token_id")
    assert text["eos_token_id"] != 2  # 2 would switch transformers to pooling at the highest id
