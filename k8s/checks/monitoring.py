"""PodMonitor, PrometheusRule and the Grafana dashboard.

The Prometheus operator's CRDs are not part of the project, so this knows the fields that the manifests use, and forbids
others. Of PromQL it knows no more than the names of metrics and balanced brackets.
"""

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jsonschema

from k8s.checks.metrics import unknown_metrics
from k8s.checks.render import Document
from k8s.checks.schema import describe

DURATION = {"type": "string", "pattern": r"^([0-9]+(ms|[smhdwy]))+$"}
TEXTS = {"type": "object", "additionalProperties": {"type": "string"}}


def _fields(required: str, optional: dict[str, Any] | None = None, **known: Any) -> dict[str, Any]:
    """An object with just these fields; `required` names some, with spaces between."""
    properties = {**known, **(optional or {})}
    return {
        "type": "object",
        "properties": properties,
        "required": required.split(),
        "additionalProperties": False,
    }


_META = _fields("name", name={"type": "string"}, namespace={"type": "string"}, labels=TEXTS, annotations=TEXTS)


def _kind(spec: dict[str, Any]) -> jsonschema.Draft202012Validator:
    text = {"type": "string"}
    return jsonschema.Draft202012Validator(
        _fields("apiVersion kind metadata spec", apiVersion=text, kind=text, metadata=_META, spec=spec)
    )


_RELABELING = _fields(
    "",
    sourceLabels={"type": "array", "items": {"type": "string"}},
    targetLabel={"type": "string"},
    regex={"type": "string"},
    replacement={"type": "string"},
    action={"enum": ["replace", "keep", "drop", "labelmap", "labeldrop", "labelkeep"]},
)
_POD_MONITOR = _kind(
    _fields(
        "selector podMetricsEndpoints",
        selector=_fields("matchLabels", matchLabels=TEXTS),
        podMetricsEndpoints={
            "type": "array",
            "minItems": 1,
            "items": _fields(
                "port",
                port={"type": "string"},
                path={"type": "string"},
                interval=DURATION,
                relabelings={"type": "array", "items": _RELABELING},
            ),
        },
    )
)
_ALERT = _fields(
    "alert expr labels annotations",
    {"for": DURATION},
    alert={"type": "string", "pattern": r"^[A-Z][A-Za-z0-9]*$"},
    expr={"type": "string", "minLength": 1},
    labels=_fields("severity", severity={"enum": ["warning", "critical"]}),
    annotations=_fields("summary description", summary={"type": "string"}, description={"type": "string"}),
)
_PROMETHEUS_RULE = _kind(
    _fields(
        "groups",
        groups={
            "type": "array",
            "minItems": 1,
            "items": _fields(
                "name rules",
                name={"type": "string", "minLength": 1},
                interval=DURATION,
                rules={"type": "array", "minItems": 1, "items": _ALERT},
            ),
        },
    )
)
VALIDATORS = {"PodMonitor": _POD_MONITOR, "PrometheusRule": _PROMETHEUS_RULE}
DASHBOARD_LABEL = "grafana_dashboard"


def monitoring_problems(document: Document) -> list[str]:
    """Of a PodMonitor or a PrometheusRule."""
    problems = [describe(error) for error in VALIDATORS[document["kind"]].iter_errors(document)]
    if problems or document["kind"] == "PodMonitor":
        return problems
    rules = [rule for group in document["spec"]["groups"] for rule in group["rules"]]
    problems += _twice("alert", [rule["alert"] for rule in rules])
    return problems + _query_problems([rule["expr"] for rule in rules])


def dashboard_problems(document: Document) -> list[str]:
    """Of a ConfigMap that Grafana's sidecar reads."""
    problems: list[str] = []
    for name, text in document["data"].items():
        try:
            dashboard = json.loads(text)
        except json.JSONDecodeError as error:
            return [f"{name} is no JSON: {error}"]
        panels = dashboard["panels"]
        problems += _twice("panel id", [panel["id"] for panel in panels])
        problems += _twice("panel title", [panel["title"] for panel in panels])
        shown = [panel for panel in panels if panel["type"] != "row"]
        problems += [f"panel {panel['title']!r} asks for nothing" for panel in shown if not panel["targets"]]
        problems += _query_problems([target["expr"] for panel in shown for target in panel["targets"]])
    return problems


def _query_problems(queries: list[str]) -> list[str]:
    return [
        *(f"brackets do not match in: {query}" for query in queries if not _balanced(query)),
        *unknown_metrics(queries),
    ]


def _balanced(query: str) -> bool:
    pairs, opened = {")": "(", "}": "{", "]": "["}, []
    for character in query:
        if character in pairs.values():
            opened.append(character)
        elif character in pairs and (not opened or opened.pop() != pairs[character]):
            return False
    return not opened


def _twice(what: str, values: list[Any]) -> Iterator[str]:
    return (f"{what} {value!r} is there {count} times" for value, count in Counter(values).items() if count > 1)
