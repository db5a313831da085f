"""docs/inputs.md: its tables are those of the code, and each error it lists is the one that comes."""

import re
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from deployments import inputs
from encoder.demo import demo_model_path
from encoder.errors import EncoderError
from encoder.preprocess import workers
from encoder.preprocess.decode import check_pixels
from encoder.preprocess.isolation import Decoder
from encoder.preprocess.policy import DecodeLimits, DecodePolicy
from encoder.preprocess.sniff import ACCEPTED
from encoder.preprocess.text import TextPipeline
from tests.preprocess.pictures import file_of, photo, png_chunk, png_file

TEXT = (Path(__file__).parents[2] / "docs/inputs.md").read_text()
BMP, JPEG = file_of(photo(9, 9), "BMP"), file_of(photo(99, 99), "JPEG")


def between(name: str) -> str:
    found = re.search(
        rf"<!-- {name}: written by `python -m deployments.inputs` -->\n(.*?)\n<!-- /{name} -->", TEXT, re.S
    )
    assert found is not None
    return found[1]


def rows(heading: str) -> list[list[str]]:
    section = TEXT[TEXT.index(f"## {heading}\n") :]
    section = section[: section.index("\n## ", 3)]
    lines = [line for line in section.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[2:]]


def test_the_tables_are_those_of_the_code() -> None:
    hint = "write the output of `python -m deployments.inputs` into docs/inputs.md"
    assert between("settings") == inputs.settings_table(), hint
    assert between("policies") == inputs.policies_table(), hint
    assert between("bounds") == inputs.bounds_table(), hint


def test_every_setting_says_what_it_is() -> None:
    table = inputs.settings_table()
    assert "None |" not in table and "| `engine.decode.max_side` | `32768` |" in table
    assert "| `max_items_per_request` | `512` |" in table


def test_the_formats_are_those_that_are_accepted() -> None:
    named = {row[0] for row in rows("Formats")} - {"raw pixels"}
    assert named == set(re.split(r", | or ", ACCEPTED))


def decoded(data: bytes) -> Callable[[], object]:
    def run() -> object:
        decoder = Decoder(DecodeLimits(), DecodePolicy(), "auto", time_limit_s=0.5)
        try:
            return decoder.decode(data)
        finally:
            decoder.close()

    return run


def tokenised(text: str) -> Callable[[], object]:
    return lambda: TextPipeline.from_folder(demo_model_path(), 32).encode(text, overflow="refuse")


def twelve_bits() -> bytes:
    data = bytearray(JPEG)
    data[data.index(b"\xff\xc0") + 4] = 12
    return bytes(data)


SENT: dict[str, Callable[[], object]] = {
    "no bytes": decoded(b""),
    "HEIC": decoded(b"\0\0\0\x18ftypheic\0\0\0\0mif1heic"),
    "too many bytes": decoded(bytes(33 << 20)),
    "too many pixels": decoded(png_file(30_000, 30_000, 8, 2, b"")),
    "a side too long": decoded(png_file(40_000, 2, 8, 2, b"")),
    "no pixels": lambda: check_pixels(b"", 0, 2, 3),
    "a truncated JPEG": decoded(JPEG[: len(JPEG) // 2]),
    "a broken PNG": decoded(file_of(photo(40, 40), "PNG")[:900]),
    "a BMP of a rare kind": decoded(BMP[:28] + b"\2" + BMP[29:]),
    "a picture that was read as text": decoded(JPEG.decode(errors="replace").encode()),
    "a 12-bit JPEG": decoded(twelve_bits()),
    "a float TIFF": decoded(file_of(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF")),
    "too many chunks": decoded(png_file(1, 1, 8, 0, b"\0\0", png_chunk(b"tEXt", b"k\0v") * 3000)),
    "raw pixels of a wrong length": lambda: check_pixels(bytes(5), 2, 2, 3),
    "a hang": decoded(BMP + b"SLEEP"),
    "a crash": decoded(BMP + b"CRASH"),
    "a worker that was killed": decoded(BMP + b"LEAVE"),
    "too many characters": tokenised("x" * 131_073),
    "too many tokens, to be refused": tokenised("a red circle " * 20),
}


def test_every_error_that_is_listed_is_tried() -> None:
    assert [row[0] for row in rows("Errors")] == list(SENT)


@pytest.mark.parametrize("row", rows("Errors"), ids=lambda row: row[0])
def test_the_errors_are_what_comes(row: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(workers, "WORKER_MODULE", "tests.preprocess.misbehaving_worker")
    sent, status, message = row
    with pytest.raises(EncoderError) as caught:
        SENT[sent]()
    assert caught.value.code == status
    assert message in str(caught.value)
