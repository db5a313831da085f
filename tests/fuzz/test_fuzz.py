"""A few seconds of what `make fuzz` does for minutes, and that it would see what is wrong."""

import time
from collections import Counter
from collections.abc import Iterator
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from encoder.errors import InvalidImage
from encoder.preprocess import workers
from encoder.preprocess.isolation import Decoder
from tests.fuzz import __main__ as command
from tests.fuzz import run
from tests.fuzz.corpus import TEXTS, checked, pictures
from tests.fuzz.mutate import mutate
from tests.preprocess.pictures import file_of, photo

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.fixture(scope="module")
def decoders() -> Iterator[list[Decoder]]:
    made = run.make_decoders()
    yield made
    for decoder in made:
        decoder.close()


def test_every_seed_is_a_picture_and_decodes(decoders: list[Decoder]) -> None:
    assert len(pictures()) > 35
    for data in pictures():
        assert decoders[0].decode(checked(data)).ndim == 3


@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(rng=st.randoms(use_true_random=False), which=st.integers(0, 2))
def test_any_mutated_picture_gives_pixels_or_invalid_image(decoders: list[Decoder], rng: Random, which: int) -> None:
    found = run.Findings()
    run.decode_one(decoders[which], mutate(rng, pictures()), found)
    assert found.faults == []


def test_mutations_reach_beyond_the_first_check(decoders: list[Decoder]) -> None:
    """Fuzzing that only ever breaks signatures would find nothing."""
    rng, found, reasons = Random(5), run.Findings(), Counter[str]()
    for _ in range(400):
        data = mutate(rng, pictures())
        run.decode_one(decoders[0], data, found)
        try:
            decoders[0].decode(data)
        except InvalidImage as error:
            reasons[str(error)[:26]] += 1
    assert found.counts["pictures decoded"] > 60 and found.counts["pictures refused"] > 100
    assert reasons["not a supported picture: s"] < 100 and len(reasons) >= 8


async def test_requests_of_any_kind_are_answered_or_refused() -> None:
    found = run.Findings()
    cores = [run.make_core("vision"), run.make_core("text")]
    try:
        await run.fuzz_requests(Random(3), time.monotonic() + 3.0, found, cores)
        assert all(core._room.items == 0 for core in cores)
    finally:
        for core in cores:
            await core.close()
    assert found.faults == []
    assert found.counts["requests answered"] > 5 and found.counts["requests call INVALID_ARGUMENT"] > 5


class TestFindings:
    """What the run calls a finding."""

    data = file_of(photo(9, 9), "BMP")

    def test_an_exception_that_is_not_of_the_project(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def broken(*_: object) -> None:
            raise KeyError("oh")

        monkeypatch.setattr("encoder.preprocess.isolation.decode_image", broken)
        found = run.Findings()
        run.decode_one(Decoder(run.LIMITS, run.DecodePolicy(), "thread"), self.data, found)
        assert found.faults == [("KeyError: 'oh'", self.data)]

    @pytest.mark.parametrize(
        ("fate", "told"), [(b"CRASH", "crashed its decoder"), (b"SLEEP", "took longer"), (b"LEAVE", "exit status 7")]
    )
    def test_a_crash_a_hang_and_a_lost_worker(self, monkeypatch: pytest.MonkeyPatch, fate: bytes, told: str) -> None:
        monkeypatch.setattr(workers, "WORKER_MODULE", "tests.preprocess.misbehaving_worker")
        decoder, found = Decoder(run.LIMITS, run.DecodePolicy(), "process", 0.5), run.Findings()
        try:
            run.decode_one(decoder, self.data + fate, found)
        finally:
            decoder.close()
        assert len(found.faults) == 1 and told in found.faults[0][0]

    def test_the_command_fails_and_keeps_the_input(self, tmp_path, capsys: pytest.CaptureFixture[str]) -> None:
        found = run.Findings(Counter({"pictures decoded": 3}), [("KeyError: 'oh'", b"the input")])
        assert command._tell(found, 100.0, 110.0, tmp_path / "kept") == 1
        (kept,) = (tmp_path / "kept").iterdir()
        assert kept.read_bytes() == b"the input"
        assert "KeyError: 'oh'" in capsys.readouterr().out
        assert command._tell(run.Findings(), 100.0, 110.0, tmp_path) == 0
        assert command._tell(run.Findings(), 100.0, 900.0, tmp_path) == 1


def test_texts_of_the_corpus_are_what_the_wire_takes() -> None:
    for text in TEXTS:
        text.encode()
