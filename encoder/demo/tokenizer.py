"""Build the demo's tokenizer: a byte-level CLIP BPE with a small vocabulary that still reads any text."""

import itertools
import json
from pathlib import Path

from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, trainers
from transformers import CLIPTokenizer

from encoder.demo.scenes import NUMBERS, OPPOSITE, PREFIXES, RELATIONS, THINGS, relation_caption, with_article

CONTEXT = 32  # tokens of one text, start and end included
START, END, PAD = "<|startoftext|>", "<|endoftext|>", "<|pad|>"


def corpus() -> list[str]:
    """Captions that hold every word of the scenes."""
    texts = [prefix + with_article(thing) for prefix in PREFIXES for thing in THINGS]
    texts += [f"{number} {thing.plural}" for number in NUMBERS[1:] for thing in THINGS]
    for relation, definite in itertools.product(OPPOSITE, (False, True)):
        for wording, _ in enumerate(RELATIONS[relation]):
            texts += [relation_caption(a, relation, b, wording, definite) for a, b in itertools.pairwise(THINGS)]
    return texts


def learn_merges(texts: list[str]) -> list[tuple[str, str]]:
    """The BPE merges that make one token of each word in `texts`, most frequent first."""
    tokenizer = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.WhitespaceSplit(), pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    trainer = trainers.BpeTrainer(vocab_size=4000, end_of_word_suffix="</w>", show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return [(left, right) for left, right in json.loads(tokenizer.to_str())["model"]["merges"]]


def build_tokenizer() -> CLIPTokenizer:
    """The tokenizer, its ids laid out as CLIP's: bytes, bytes at a word's end, merges, then the special tokens.

    Padding is a token of its own, so that pooling at the first end token never meets it.
    """
    merges = learn_merges(corpus())
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = [*alphabet, *(f"{byte}</w>" for byte in alphabet), *("".join(pair) for pair in merges), PAD, START, END]
    return CLIPTokenizer(
        vocab={token: index for index, token in enumerate(dict.fromkeys(tokens))},
        merges=merges,  # type: ignore[arg-type]  # pairs are what tokenizers takes; the hint says strings
        bos_token=START,
        eos_token=END,
        unk_token=END,
        pad_token=PAD,
        model_max_length=CONTEXT,
    )


def save_tokenizer(tokenizer: CLIPTokenizer, folder: Path) -> None:
    """Write every tokenizer file that transformers, old or new, and the `tokenizers` library look for."""
    tokenizer.save_pretrained(folder)
    described = json.loads((folder / "tokenizer.json").read_text())
    described["truncation"] = {
        "direction": "Right",
        "max_length": CONTEXT,
        "strategy": "LongestFirst",
        "stride": 0,
    }
    write_json(folder / "tokenizer.json", described)
    model = described["model"]
    write_json(folder / "vocab.json", model["vocab"])
    lines = ["#version: 0.2", *(" ".join(pair) for pair in model["merges"])]
    (folder / "merges.txt").write_text("\n".join(lines) + "\n")
    special = {"bos_token": START, "eos_token": END, "pad_token": PAD, "unk_token": END}
    write_json(folder / "special_tokens_map.json", special)


def write_json(path: Path, content: object) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1) + "\n")
