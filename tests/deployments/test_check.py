"""`vitfleet check` in this process: what it takes, and that it shows what was proved."""

import json

import pytest
from typer.testing import CliRunner, Result

from deployments.cli.app import app
from encoder.errors import InvalidInput
from encoder.graphs import proof


@pytest.fixture(autouse=True)
def any_speed_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(proof, "SLOWER_THAN_EAGER", 1e9)


def check(*arguments: str) -> Result:
    return CliRunner().invoke(app, ["check", "--tower", "vision", "--dtype", "float32", *arguments])


def test_buckets_are_those_that_were_asked_for_and_their_figures_are_told() -> None:
    done = check("--buckets", "3, 1", "--json")
    assert done.exit_code == 0, done.output
    (replica,) = json.loads(done.stdout)["replicas"]
    assert [graph["bucket"] for graph in replica["graphs"]] == ["batch=1", "batch=3"]
    assert all(graph["state"] == "ready" and graph["replay_ms"] > 0 for graph in replica["graphs"])
    assert all(0.999999 <= graph["worst_cosine"] < 1.000001 for graph in replica["graphs"])
    assert all(0 < graph["max_abs_error"] <= 1e-5 for graph in replica["graphs"])


def test_the_tables_show_each_bucket_each_check_and_each_stage() -> None:
    done = check("--buckets", "2", "--runner", "eager")
    assert done.exit_code == 0, done.output
    rows = [[cell.strip() for cell in line.strip("│").split("│")] for line in done.stdout.splitlines() if "│" in line]
    (graph,) = [row for row in rows if row[1] == "batch=2"]
    assert graph[2:10] == ["eager", "sdpa", "float32", "eager", "-", "-", "-", "-"] and graph[10].endswith(" ms")
    assert {row[-1] for row in rows if len(row) == 9 and row[1].startswith("vectors")} == {"yes"}
    assert {"load", "reference", "self-check sdpa"} <= {row[1] for row in rows if len(row) == 3}


@pytest.mark.parametrize(("buckets", "said"), [("0", "greater than 0"), ("1;2", "valid integer"), ("1,,2", "integer")])
def test_what_is_no_list_of_batch_sizes_is_refused(buckets: str, said: str) -> None:
    done = check("--buckets", buckets)
    assert isinstance(done.exception, InvalidInput) and "buckets." in str(done.exception)
    assert said in str(done.exception)
