"""`python -m deployments.router.tokens make`: the token is shown once, its entry can be added to the file."""

import hashlib
import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from deployments.router.tokens.__main__ import main
from deployments.router.tokens.entries import load_entries
from encoder.errors import InvalidInput

from .test_tokens import entry, write

ROOT = Path(__file__).parents[2]


def make(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "deployments.router.tokens", "make", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=False)


def test_entries_can_be_added_to_a_file_and_know_their_token(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    tokens = []
    for name, limits in (("alice", []), ("team.b@example", ["--burst", "7", "--max-items-per-second", "50"])):
        done = make(name, *limits)
        assert done.returncode == 0
        with file.open("a") as entries:
            entries.write(done.stdout)
        found = re.fullmatch(rf"the token of {re.escape(name)}, shown only now: (vf_\S{{40,}})\n", done.stderr)
        assert found is not None
        assert found[1] not in done.stdout
        tokens.append(found[1])
    first, second = load_entries(file)
    assert tokens[0] != tokens[1]
    assert [first.sha256, second.sha256] == [hashlib.sha256(token.encode()).hexdigest() for token in tokens]
    assert (first.name, first.requests_per_second, first.burst, first.max_in_flight) == ("alice", 100.0, 200.0, 64)
    assert first.max_items_per_second is None
    assert (second.name, second.burst, second.max_items_per_second) == ("team.b@example", 7.0, 50.0)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["two words"], "name"),
        ([""], "name"),
        (["alice", "--burst", "0"], "burst"),
        (["alice", "--max-in-flight", "0"], "max_in_flight"),
    ],
)
def test_what_no_entry_can_have_is_refused_without_a_token(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["make", *arguments]) == 2
    told = capsys.readouterr()
    assert named in told.err
    assert len(told.err.splitlines()) == 1
    assert "vf_" not in told.err
    assert told.out == ""


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"name": "a b"}, "0.name"),
        ({"sha256": "0" * 63}, "0.sha256"),
        ({"sha256": "G" * 64}, "0.sha256"),
        ({"requests_per_second": 0}, "0.requests_per_second"),
        ({"burst": 0.5}, "0.burst"),
        ({"max_in_flight": 0}, "0.max_in_flight"),
        ({"max_items_per_second": 0}, "0.max_items_per_second"),
        ({"rate": 1}, "0.rate"),
    ],
)
def test_refused_entries_are_named_by_their_key(tmp_path: Path, values: dict[str, object], named: str) -> None:
    with pytest.raises(InvalidInput, match=re.escape(named)) as caught:
        load_entries(write(tmp_path / "tokens.yaml", entry("alice", "a") | values))
    assert "\n" not in str(caught.value)


def test_one_token_cannot_have_two_owners(tmp_path: Path) -> None:
    file = write(tmp_path / "tokens.yaml", entry("alice", "a"), entry("bob", "a"))
    with pytest.raises(InvalidInput, match=r"differ in sha256.*alice, bob"):
        load_entries(file)


def test_json_is_taken_too_and_an_empty_list_lets_nobody_in(tmp_path: Path) -> None:
    file = tmp_path / "tokens.json"
    file.write_text(json.dumps([entry("a", "token")]))
    assert [one.name for one in load_entries(file)] == ["a"]
    file.write_text("[]")
    assert load_entries(file) == ()


def test_what_stands_in_a_broken_file_is_not_quoted(tmp_path: Path) -> None:
    file = tmp_path / "tokens.yaml"
    file.write_text("- name: a\n  token: vf_secret: {\n")
    with pytest.raises(InvalidInput, match="line 2") as caught:
        load_entries(file)
    assert "vf_secret" not in str(caught.value)
    assert "\n" not in str(caught.value)
