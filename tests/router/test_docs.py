"""docs/router.md: its tables are those of the code, and its examples are settings that hold."""

import re
from pathlib import Path

import grpc
import pytest
import yaml

from deployments.router import describe
from deployments.router.metrics import PREFIX, Metrics
from deployments.router.settings import RouterSettings, parse_settings
from deployments.router.tokens.entries import TokenEntry

DOCS = Path(__file__).parents[2] / "docs/router.md"
TEXT = DOCS.read_text()


def between(name: str) -> str:
    found = re.search(rf"<!-- {name}: written by `(.+?)` -->\n(.*?)\n?<!-- /{name} -->", TEXT, re.S)
    assert found is not None
    assert found[1] == "python -m deployments.router.describe"
    return found[2]


def test_the_tables_are_those_of_the_settings() -> None:
    hint = "write the output of `python -m deployments.router.describe` into docs/router.md"
    assert between("settings") == describe.settings_table(), hint
    assert between("entries") == describe.entries_table(), hint


def test_every_setting_has_a_row_that_tells_what_it_is() -> None:
    rows = [[cell.strip() for cell in line.split(" | ")] for line in describe.settings_table().splitlines()[2:]]
    names = {row[0].strip("| `") for row in rows}
    assert all(len(row) == 3 and row[1] and row[2].strip(" |") for row in rows)
    # Counted another way: every leaf of the JSON schema.
    schema = RouterSettings.model_json_schema()

    def leaves(part: dict[str, object], prefix: str) -> set[str]:
        for key in ("anyOf", "allOf"):
            if key in part:
                return set().union(*(leaves(one, prefix) for one in part[key]))  # type: ignore[union-attr]
        if "$ref" in part:
            return leaves(schema["$defs"][str(part["$ref"]).rsplit("/", 1)[1]], prefix)
        if part.get("type") == "array" and "$ref" in part.get("items", {}):  # type: ignore[operator]
            return leaves(part["items"], prefix + "[]")  # type: ignore[arg-type]
        if "properties" in part:
            dot = "." if prefix else ""
            properties: dict[str, dict[str, object]] = part["properties"]  # type: ignore[assignment]
            return set().union(*(leaves(one, f"{prefix}{dot}{name}") for name, one in properties.items()))
        return {prefix}

    assert leaves(schema, "") <= names
    assert {f"`{name}`" for name in TokenEntry.model_fields} <= set(re.findall(r"`\w+`", describe.entries_table()))


def test_a_wrong_default_would_be_seen() -> None:
    assert "| `retry.attempts` | `3` |" in describe.settings_table()
    assert "| `tls.key` | required |" in describe.settings_table()
    assert "| `tls` | empty |" in describe.settings_table()
    assert "| `pools[].tls.server_name` | empty |" in describe.settings_table()


@pytest.mark.parametrize("example", re.findall(r"```yaml\n(.*?)```", TEXT, re.S))
def test_examples_are_settings_that_hold(example: str) -> None:
    parse_settings(yaml.safe_load(example))


def test_every_metric_is_named_and_no_other() -> None:
    metrics = Metrics()
    section = TEXT[TEXT.index("## Logs and metrics") : TEXT.index("## Stopping")]
    told = set(re.findall(r"`(\w+)`", "".join(re.findall(r"^\| .*? \|", section, re.M)[2:]))) - {"metric"}
    real = {
        name.removeprefix(PREFIX)
        for name in metrics.registry._names_to_collectors
        if not name.endswith(("_created", "_bucket", "_count", "_sum"))
    }
    gauges = {name for name in told if name.startswith("pool_") and name not in real}
    assert told - gauges <= real
    assert {name for name in real if f"{name}_total" not in real} <= told
    assert gauges == {
        "pool_in_flight_items", "pool_items_per_second", "pool_healthy", "pool_quarantined", "pool_ejected",
        "pool_replicas", "pool_demoted_replicas", "pool_failed_self_checks",
    }  # fmt: skip


def test_the_codes_are_codes() -> None:
    section = TEXT[TEXT.index("## Status codes") : TEXT.index("## Metadata")]
    codes = re.findall(r"^\| ([A-Z_]+) \|", section, re.M)
    assert len(codes) >= 9
    assert set(codes) <= {code.name for code in grpc.StatusCode}
