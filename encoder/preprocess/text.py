"""Texts to tokens, with the checkpoint's own tokenizer; never with a hub's.

transformers reads the tokenizer from the folder; encoding goes to its Rust part directly, in two copies that are set
up once: one reads the text whole, the other cuts the tokens and adds the special ones. transformers' own call sets
truncation and padding anew each time on one shared object, which threads then take from one another. Encoding as a
batch of one, because that is what the Rust part does without the GIL.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np

from encoder.errors import CheckpointError, InvalidInput, InvalidText

Overflow = Literal["truncate", "refuse"]
# longest: to the longest of the batch (or a bucket), padding masked: CLIP.
# max_length: always to the model's length, padding not masked: SigLIP, which was trained that way.
PadRule = Literal["longest", "max_length"]
MAX_CHARACTERS = 131_072
TOKENIZER_FILES = ("tokenizer.json", "vocab.json", "vocab.txt", "tokenizer.model", "spiece.model")


@dataclass(frozen=True, slots=True)
class TokenizedText:
    """Tokens of one text with the special ones, at most the model's length; `token_count` is before truncation."""

    input_ids: list[int]
    token_count: int
    truncated: bool


@dataclass(frozen=True, slots=True)
class TokenBatch:
    """int64 [n, L] each; the mask is 0 where attention must not look."""

    input_ids: np.ndarray
    attention_mask: np.ndarray


class TextPipeline:
    """The tokenizer of one checkpoint. `encode` and `collate` may be called from any thread."""

    def __init__(self, tokenizer: Any, max_length: int, pad_rule: PadRule, max_characters: int) -> None:
        self.max_length = max_length
        self.pad_rule = pad_rule
        self.max_characters = max_characters
        self._name = type(tokenizer).__name__
        self._pad_id: int = tokenizer.pad_token_id
        self._pad_left = tokenizer.padding_side == "left"
        self._whole = _copy(tokenizer)
        self._cut = _copy(tokenizer)
        self._special: int = tokenizer.num_special_tokens_to_add()
        self._digest = hashlib.sha256(self._whole.to_str().encode()).hexdigest()
        self._cut.enable_truncation(max_length, direction=tokenizer.truncation_side)

    @classmethod
    def from_folder(
        cls, folder: Path, max_length: int, pad_rule: PadRule = "longest", max_characters: int = MAX_CHARACTERS
    ) -> "TextPipeline":
        """Loads the tokenizer of a checkpoint's folder. Raises CheckpointError.

        `max_length`: tokens the model takes, special ones included. `max_characters`: longer texts are refused unread.
        """
        from transformers import AutoTokenizer

        if not folder.is_dir():
            raise CheckpointError(f"tokenizer: {folder} is no folder; give the folder of a checkpoint")
        if not any((folder / name).exists() for name in TOKENIZER_FILES):
            # Without any of them transformers would make an empty tokenizer, and every text would be unknown.
            raise CheckpointError(f"tokenizer: {folder.name} has no {' or '.join(TOKENIZER_FILES)}: add its tokenizer")
        try:
            tokenizer = AutoTokenizer.from_pretrained(str(folder), local_files_only=True, trust_remote_code=False)
        except Exception as error:  # a broken or foreign tokenizer fails in as many ways as there are tokenizers
            reason = " ".join(str(error).split())[:300]
            raise CheckpointError(f"tokenizer: {folder.name} holds none that loads: {reason}") from error
        name = type(tokenizer).__name__
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise CheckpointError(f"tokenizer: {name} of {folder.name} has no fast form; add its tokenizer.json")
        if tokenizer.pad_token_id is None:
            raise CheckpointError(
                f"tokenizer: {name} of {folder.name} has no padding token; set pad_token in its config"
            )
        special = tokenizer.num_special_tokens_to_add()
        if max_length <= special:
            raise CheckpointError(f"tokenizer: length {max_length} leaves no room beside {special} special tokens")
        return cls(tokenizer, max_length, pad_rule, max_characters)

    def check_vocabulary(self, name: str, vocab_size: int) -> None:
        """Raises CheckpointError when the tokenizer gives ids that a model of `vocab_size` tokens does not have."""
        known = 1 + max(self._whole.get_vocab().values())
        if known > vocab_size:
            raise CheckpointError(
                f"{name}: its tokenizer knows {known} tokens, its model {vocab_size}: they do not belong together"
            )

    def encode(self, text: str, overflow: Overflow = "truncate") -> TokenizedText:
        """Tokens of a text; the empty text is its special tokens.

        A text that is too long is cut as the model's own tokenizer cuts it (which keeps the end token), or refused.
        Raises InvalidText for that, for a text that is not valid Unicode, and for one beyond `max_characters`.
        """
        if not isinstance(text, str):
            raise InvalidText(f"a text is {type(text).__name__}, not a string; decode it as UTF-8 first")
        if len(text) > self.max_characters:
            raise InvalidText(
                f"the text has {len(text)} characters, over the limit of {self.max_characters}; shorten it"
            )
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidText(f"the text is not valid Unicode at character {error.start}; send UTF-8") from None
        tokens = self._whole.encode_batch_fast([text], add_special_tokens=False)[0]
        count = len(tokens) + self._special
        if count == 0:
            raise InvalidText("the text has no tokens for this model; send one that is not empty")
        if count > self.max_length and overflow == "refuse":
            raise InvalidText(f"the text has {count} tokens, the model takes {self.max_length}; shorten it or truncate")
        return TokenizedText(self._cut.post_process(tokens).ids, count, truncated=count > self.max_length)

    def collate(self, texts: Sequence[TokenizedText], pad_to: int | None = None) -> TokenBatch:
        """A batch, padded by the pad rule on the tokenizer's own side.

        `pad_to`: a bucket's length; none: the longest text's, or the model's under the rule max_length. Raises
        InvalidInput for no texts, and for a `pad_to` that the texts or the rule do not fit.
        """
        if not texts:
            raise InvalidInput("collate: no texts; give one or more")
        longest = max(len(text.input_ids) for text in texts)
        fixed = self.pad_rule == "max_length"
        length = pad_to if pad_to is not None else self.max_length if fixed else longest
        if not longest <= length <= self.max_length or (fixed and length != self.max_length):
            allowed = self.max_length if fixed else f"{longest} to {self.max_length}"
            raise InvalidInput(f"collate: pad_to={pad_to} does not fit; it can be {allowed}")
        input_ids = np.full((len(texts), length), self._pad_id, dtype=np.int64)
        attention_mask = np.full((len(texts), length), int(fixed), dtype=np.int64)
        for row, text in enumerate(texts):
            used = len(text.input_ids)
            place = slice(length - used, length) if self._pad_left else slice(0, used)
            input_ids[row, place] = text.input_ids
            attention_mask[row, place] = 1
        return TokenBatch(input_ids, attention_mask)

    def describe(self) -> dict[str, Any]:
        """JSON-ready; pipelines that describe themselves alike make the same tokens."""
        return {
            "tokenizer": self._name,
            "tokenizer_sha256": self._digest,
            "max_tokens": self.max_length,
            "pad_rule": self.pad_rule,
            "pad_masked": self.pad_rule == "longest",
            "pad_id": self._pad_id,
            "padding_side": "left" if self._pad_left else "right",
        }


def _copy(tokenizer: Any) -> Any:
    """A Rust tokenizer of one's own, without truncation or padding."""
    from tokenizers import Tokenizer

    copy = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    copy.no_truncation()
    copy.no_padding()
    copy.encode_special_tokens = tokenizer.split_special_tokens
    return copy
