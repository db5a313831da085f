"""Tokenizers of the kinds that checkpoints come with, over letters alone, saved as a checkpoint's folder has them."""

import string
from pathlib import Path
from typing import Any

from transformers import CLIPTokenizer, GemmaTokenizer, PreTrainedTokenizerBase, XLMRobertaTokenizer
from transformers.models.siglip2.tokenization_siglip2 import Siglip2Tokenizer

LETTERS = string.ascii_letters + string.digits + ".,!?"


def save_clip(folder: Path) -> int:
    """CLIP's kind: lower-cased letters, ends of words marked, start and end at the top. Gives the end's id."""
    pieces = [*string.ascii_lowercase, *(letter + "</w>" for letter in string.ascii_lowercase), "!", "!</w>"]
    vocabulary = {piece: index for index, piece in enumerate([*pieces, "<|startoftext|>", "<|endoftext|>"])}
    CLIPTokenizer(vocab=vocabulary, merges=[], model_max_length=16).save_pretrained(folder)
    return vocabulary["<|endoftext|>"]


def save_xlm_roberta(folder: Path) -> int:
    """MetaCLIP 2's kind: a unigram vocabulary with `<s>`, `<pad>` and `</s>` as 0, 1 and 2. Gives the end's id."""
    pieces = ["<s>", "<pad>", "</s>", "<unk>", "▁", *LETTERS, *(f"▁{letter}" for letter in string.ascii_lowercase)]
    XLMRobertaTokenizer(vocab=[(piece, -1.0 - index / 100) for index, piece in enumerate(pieces)]).save_pretrained(
        folder
    )
    return 2


def save_gemma(folder: Path, *, lower: bool) -> None:
    """SigLIP2's kinds: Gemma's as the fixed-size checkpoints name it, or the one that lower-cases by itself."""
    kind: Any = Siglip2Tokenizer if lower else GemmaTokenizer
    pieces = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>", "▁", *LETTERS]
    vocabulary = {piece: index for index, piece in enumerate(pieces)}
    tokenizer: PreTrainedTokenizerBase = kind(
        vocab=vocabulary, merges=[], padding_side="right", model_max_length=64, add_bos_token=False, add_eos_token=True
    )
    tokenizer.save_pretrained(folder)
