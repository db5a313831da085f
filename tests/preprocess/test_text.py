"""Tokens against transformers' own call of the same tokenizer; CLIP's real vocabulary where it can be had."""

import json
import shutil
import socket
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, CLIPTokenizer, PreTrainedTokenizerFast

from encoder.errors import CheckpointError, InvalidInput, InvalidText
from encoder.preprocess.text import MAX_CHARACTERS, TextPipeline
from tests.support.clip_vocab import VocabularyUnavailable, clip_tokenizer_folder

TEXTS = [
    "",
    " ",
    "a photo of a cat",
    "A Photo OF a\n\tCat",
    "it's the dogs' 42nd 3.14 café naïve",
    "emoji 😀👩‍👩‍👧 and flags 🇩🇪",
    "مرحبا بالعالم שלום",
    "日本語のテキスト 한국어",
    "control \x00\x01\x1b\x7f characters",
    "zero\u200bwidth \ufeff bom e\u0301",
    "a b " * 37 + "ab",
    "word " * 75,
    "word " * 76,
    "word " * 200,
    "x" * 5000,
    "text with <|endoftext|> and <|startoftext|> in it",
]


@pytest.fixture(scope="module")
def clip_folder() -> Path:
    """CLIP's real tokenizer."""
    try:
        return clip_tokenizer_folder()
    except VocabularyUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def small_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tokenizer of CLIP's kind with a handful of merges; needs no download."""
    folder = tmp_path_factory.mktemp("small")
    letters = pre_tokenizers.ByteLevel.alphabet()
    merges = [("c", "a"), ("ca", "t</w>"), ("d", "o"), ("do", "g</w>")]
    tokens = [*sorted(letters), *sorted(letter + "</w>" for letter in letters), *("".join(pair) for pair in merges)]
    vocabulary = {token: index for index, token in enumerate([*tokens, "<|startoftext|>", "<|endoftext|>"])}
    CLIPTokenizer(vocab=vocabulary, merges=merges).save_pretrained(folder)
    return folder


def oracle(folder: Path, text: str, max_length: int | None = None) -> list[int]:
    """Token ids as transformers gives them."""
    tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
    if max_length is None:
        return tokenizer(text)["input_ids"]
    return tokenizer(text, truncation=True, max_length=max_length)["input_ids"]


class TestClip:
    def test_known_ids(self, clip_folder: Path) -> None:
        """The ids are CLIP's own, as its paper's code prints them."""
        found = TextPipeline.from_folder(clip_folder, 77).encode("a photo of a cat")
        assert found.input_ids == [49406, 320, 1125, 539, 320, 2368, 49407]
        assert found.token_count == 7 and not found.truncated

    def test_equals_transformers(self, clip_folder: Path) -> None:
        pipeline = TextPipeline.from_folder(clip_folder, 77)
        tokenizer = AutoTokenizer.from_pretrained(str(clip_folder), local_files_only=True)
        for text in TEXTS:
            found, whole = pipeline.encode(text), tokenizer(text)["input_ids"]
            assert found.input_ids == tokenizer(text, truncation=True, max_length=77)["input_ids"], text
            assert found.token_count == len(whole), text
            assert found.truncated == (len(whole) > 77), text

    def test_batches_equal_transformers(self, clip_folder: Path) -> None:
        pipeline = TextPipeline.from_folder(clip_folder, 77)
        tokenizer = AutoTokenizer.from_pretrained(str(clip_folder), local_files_only=True)
        batch = pipeline.collate([pipeline.encode(text) for text in TEXTS[:6]])
        expected = tokenizer(TEXTS[:6], padding=True, return_tensors="np")
        assert np.array_equal(batch.input_ids, expected["input_ids"])
        assert np.array_equal(batch.attention_mask, expected["attention_mask"])
        assert batch.attention_mask.min() == 0

    @settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
    @given(text=st.text(max_size=120))
    def test_any_text(self, clip_folder: Path, text: str) -> None:
        pipeline, tokenizer = self._loaded(clip_folder)
        found = pipeline.encode(text)
        assert found.input_ids == tokenizer(text, truncation=True, max_length=12)["input_ids"]
        assert found.token_count == len(tokenizer(text)["input_ids"])

    def _loaded(self, folder: Path) -> tuple[TextPipeline, object]:
        if not hasattr(TestClip, "_both"):
            TestClip._both = (  # type: ignore[attr-defined]
                TextPipeline.from_folder(folder, 12),
                AutoTokenizer.from_pretrained(str(folder), local_files_only=True),
            )
        return TestClip._both  # type: ignore[attr-defined,no-any-return]


class TestEncode:
    @pytest.mark.parametrize("text", TEXTS)
    @pytest.mark.parametrize("max_length", [3, 16, 77])
    def test_equals_transformers(self, small_folder: Path, text: str, max_length: int) -> None:
        found = TextPipeline.from_folder(small_folder, max_length).encode(text)
        whole = oracle(small_folder, text)
        assert found.input_ids == oracle(small_folder, text, max_length)
        assert (found.token_count, found.truncated) == (len(whole), len(whole) > max_length)

    def test_a_cut_keeps_the_end_token(self, small_folder: Path) -> None:
        pipeline = TextPipeline.from_folder(small_folder, 6)
        cut, whole = pipeline.encode("cat dog cat dog cat dog cat"), pipeline.encode("cat dog cat dog")
        assert cut.input_ids == whole.input_ids and cut.input_ids[-1] == oracle(small_folder, "")[-1]
        assert cut.truncated and cut.token_count == 9
        assert not whole.truncated and whole.token_count == 6

    def test_a_long_text_can_be_refused(self, small_folder: Path) -> None:
        pipeline = TextPipeline.from_folder(small_folder, 6)
        assert pipeline.encode("cat dog cat dog", overflow="refuse").token_count == 6
        with pytest.raises(InvalidText, match="9 tokens, the model takes 6"):
            pipeline.encode("cat dog cat dog cat dog cat", overflow="refuse")

    @pytest.mark.parametrize("text", ["\ud800", "a cat \udfff", "\udcff\udcfe"])
    def test_lone_surrogates_are_refused(self, small_folder: Path, text: str) -> None:
        at = len(text.rstrip("".join(map(chr, range(0xD800, 0xE000)))))
        with pytest.raises(InvalidText, match=f"not valid Unicode at character {at}"):
            TextPipeline.from_folder(small_folder, 77).encode(text)

    @pytest.mark.parametrize("text", [b"a cat", None, 7])
    def test_what_is_no_string_is_refused(self, small_folder: Path, text: object) -> None:
        with pytest.raises(InvalidText, match="not a string"):
            TextPipeline.from_folder(small_folder, 77).encode(text)  # type: ignore[arg-type]

    def test_a_megabyte_is_refused_and_the_limit_is_not(self, small_folder: Path) -> None:
        pipeline = TextPipeline.from_folder(small_folder, 77)
        with pytest.raises(InvalidText, match="1000000 characters, over the limit of 131072"):
            pipeline.encode("x" * 1_000_000)
        found = pipeline.encode("😀" * MAX_CHARACTERS)
        assert found.token_count > MAX_CHARACTERS and len(found.input_ids) == 77 and found.truncated

    def test_errors_hold_no_text(self, small_folder: Path) -> None:
        pipeline = TextPipeline.from_folder(small_folder, 6)
        for text in ("secret " * 20, "secret\ud800", "secret" * MAX_CHARACTERS):
            with pytest.raises(InvalidText) as caught:
                pipeline.encode(text, overflow="refuse")
            assert "secret" not in str(caught.value)

    def test_threads_do_not_disturb_each_other(self, small_folder: Path) -> None:
        pipeline = TextPipeline.from_folder(small_folder, 12)
        texts = [text * times for text in TEXTS[:10] for times in (1, 3, 9)]
        expected = [pipeline.encode(text) for text in texts]
        start = threading.Barrier(8)

        def work(_: int) -> bool:
            start.wait()
            return all([pipeline.encode(text) for text in texts] == expected for _ in range(10))

        with ThreadPoolExecutor(8) as pool:
            assert all(pool.map(work, range(8)))


class TestCollate:
    def test_pads_to_a_bucket_and_masks_the_padding(self, small_folder: Path) -> None:
        pipeline = TextPipeline.from_folder(small_folder, 77)
        tokenizer = AutoTokenizer.from_pretrained(str(small_folder), local_files_only=True)
        texts = ["cat", "dog cat dog", ""]
        batch = pipeline.collate([pipeline.encode(text) for text in texts], pad_to=16)
        expected = tokenizer(texts, padding="max_length", max_length=16, return_tensors="np")
        assert batch.input_ids.dtype == batch.attention_mask.dtype == np.int64
        assert np.array_equal(batch.input_ids, expected["input_ids"])
        assert np.array_equal(batch.attention_mask, expected["attention_mask"])
        assert batch.attention_mask.sum(axis=1).tolist() == [3, 5, 2]

    def test_the_rule_max_length_pads_all_the_way_without_a_mask(self, small_folder: Path) -> None:
        pipeline = TextPipeline.from_folder(small_folder, 64, pad_rule="max_length")
        tokenizer = AutoTokenizer.from_pretrained(str(small_folder), local_files_only=True)
        texts = ["cat", "dog " * 100]
        batch = pipeline.collate([pipeline.encode(text) for text in texts])
        expected = tokenizer(texts, padding="max_length", max_length=64, truncation=True, return_tensors="np")
        assert np.array_equal(batch.input_ids, expected["input_ids"])
        assert batch.attention_mask.shape == (2, 64) and (batch.attention_mask == 1).all()
        assert np.array_equal(pipeline.collate([pipeline.encode("cat")], pad_to=64).input_ids, batch.input_ids[:1])
        with pytest.raises(InvalidInput, match="it can be 64"):
            pipeline.collate([pipeline.encode("cat")], pad_to=16)

    def test_pads_on_the_tokenizers_side(self, small_folder: Path, tmp_path: Path) -> None:
        folder = tmp_path / "left"
        shutil.copytree(small_folder, folder)
        written = json.loads((folder / "tokenizer_config.json").read_text())
        (folder / "tokenizer_config.json").write_text(json.dumps({**written, "padding_side": "left"}))
        pipeline = TextPipeline.from_folder(folder, 77)
        tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True)
        batch = pipeline.collate([pipeline.encode(text) for text in ("cat", "dog cat dog")])
        expected = tokenizer(["cat", "dog cat dog"], padding=True, return_tensors="np")
        assert np.array_equal(batch.input_ids, expected["input_ids"])
        assert np.array_equal(batch.attention_mask, expected["attention_mask"])
        assert batch.attention_mask[0].tolist() == [0, 0, 1, 1, 1]
        assert pipeline.describe() != TextPipeline.from_folder(small_folder, 77).describe()

    @pytest.mark.parametrize(("pad_to", "allowed"), [(4, "5 to 77"), (78, "5 to 77")])
    def test_a_length_that_does_not_fit_is_refused(self, small_folder: Path, pad_to: int, allowed: str) -> None:
        pipeline = TextPipeline.from_folder(small_folder, 77)
        with pytest.raises(InvalidInput, match=f"pad_to={pad_to} does not fit; it can be {allowed}"):
            pipeline.collate([pipeline.encode("dog cat dog")], pad_to=pad_to)

    def test_no_texts_are_refused(self, small_folder: Path) -> None:
        with pytest.raises(InvalidInput, match="no texts"):
            TextPipeline.from_folder(small_folder, 77).collate([])


class TestLoading:
    def test_contacts_nobody(self, small_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        asked: list[object] = []

        def refuse(*arguments: object) -> None:
            asked.append(arguments)
            raise OSError("no network here")

        monkeypatch.setattr(socket.socket, "connect", refuse)
        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        assert TextPipeline.from_folder(small_folder, 77).encode("cat").token_count == 3
        assert asked == []

    def test_says_what_it_is(self, small_folder: Path) -> None:
        described = TextPipeline.from_folder(small_folder, 77).describe()
        assert json.loads(json.dumps(described)) == described
        assert described["max_tokens"] == 77 and described["pad_rule"] == "longest" and described["pad_masked"]
        assert described != TextPipeline.from_folder(small_folder, 76).describe()
        assert described != TextPipeline.from_folder(small_folder, 77, pad_rule="max_length").describe()

    def test_another_vocabulary_is_another_description(self, small_folder: Path, tmp_path: Path) -> None:
        folder = tmp_path / "other"
        shutil.copytree(small_folder, folder)
        tokenizer = json.loads((folder / "tokenizer.json").read_text())
        tokenizer["model"]["merges"].pop()
        (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        assert TextPipeline.from_folder(folder, 77).describe() != TextPipeline.from_folder(small_folder, 77).describe()

    def test_truncation_and_padding_written_into_the_tokenizer_do_not_count(self, tmp_path: Path) -> None:
        words = Tokenizer(models.WordLevel({"cat": 0, "dog": 1, "?": 2}, unk_token="?"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        words.enable_truncation(3)
        words.enable_padding(length=20, pad_id=2, pad_token="?")
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="?").save_pretrained(tmp_path)
        assert json.loads((tmp_path / "tokenizer.json").read_text())["truncation"]["max_length"] == 3
        found = TextPipeline.from_folder(tmp_path, 77).encode("cat dog cat dog cat")
        assert found.input_ids == [0, 1, 0, 1, 0] and found.token_count == 5

    def test_a_missing_folder(self, tmp_path: Path) -> None:
        with pytest.raises(CheckpointError, match="is no folder"):
            TextPipeline.from_folder(tmp_path / "nowhere", 77)

    def test_a_folder_without_a_tokenizer(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CLIPTokenizer"}')
        assert len(AutoTokenizer.from_pretrained(str(tmp_path))) < 10  # transformers makes an empty one
        with pytest.raises(CheckpointError, match=r"has no tokenizer\.json or .*: add its tokenizer"):
            TextPipeline.from_folder(tmp_path, 77)

    @pytest.mark.parametrize("content", ["{", "{}"])
    def test_a_tokenizer_that_does_not_load(self, tmp_path: Path, content: str) -> None:
        (tmp_path / "tokenizer.json").write_text(content)
        (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "CLIPTokenizer"}')
        with pytest.raises(CheckpointError, match="holds none that loads") as caught:
            TextPipeline.from_folder(tmp_path, 77)
        assert "\n" not in str(caught.value)

    def test_no_padding_token(self, tmp_path: Path) -> None:
        words = Tokenizer(models.WordLevel({"cat": 0, "?": 1}, unk_token="?"))
        words.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=words).save_pretrained(tmp_path / "bare")
        with pytest.raises(CheckpointError, match="no padding token"):
            TextPipeline.from_folder(tmp_path / "bare", 77)
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token="?").save_pretrained(tmp_path / "padded")
        pipeline = TextPipeline.from_folder(tmp_path / "padded", 77)
        assert pipeline.encode("cat dog").input_ids == [0, 1]
        with pytest.raises(InvalidText, match="no tokens"):
            pipeline.encode("")

    def test_a_vocabulary_larger_than_the_models(self, small_folder: Path) -> None:
        pipeline = TextPipeline.from_folder(small_folder, 77)
        highest = max(AutoTokenizer.from_pretrained(str(small_folder)).get_vocab().values())
        pipeline.check_vocabulary("clip", highest + 1)
        with pytest.raises(
            CheckpointError, match=f"clip: its tokenizer knows {highest + 1} tokens, its model {highest}"
        ):
            pipeline.check_vocabulary("clip", highest)

    def test_no_room_beside_the_special_tokens(self, small_folder: Path) -> None:
        with pytest.raises(CheckpointError, match="length 2 leaves no room"):
            TextPipeline.from_folder(small_folder, 2)
