"""Names of metrics: which ones a query asks for, and which ones the router and Ray Serve export."""

import ast
import asyncio
import re
from collections.abc import Iterable, Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from deployments.router.server import Router
from deployments.router.settings import parse_settings

# Ray exports its metrics under this prefix.
RAY_PREFIX = "ray_"
# What Prometheus knows of every target by itself.
PROMETHEUS_OWN = frozenset({"up"})
SUFFIXES = {"Counter": ("_total",), "Gauge": ("",), "Histogram": ("_bucket", "_sum", "_count")}

# In a query, a name that no parenthesis follows and that is no keyword, label or number is a metric.
_QUOTED = re.compile(r"\"[^\"]*\"|'[^']*'")
_BRACED = re.compile(r"\{[^}]*\}|\[[^\]]*\]")
_GROUPING = re.compile(r"\b(by|without|on|ignoring|group_left|group_right)\s*\([^)]*\)")
_NAME = re.compile(r"[a-zA-Z_:][a-zA-Z0-9_:]*\b(?!\s*\()")
_WORDS = frozenset(
    {
        "and",
        "or",
        "unless",
        "bool",
        "offset",
        "by",
        "without",
        "on",
        "ignoring",
        "group_left",
        "group_right",
        "Inf",
        "NaN",
    }
)


def metrics_of(query: str) -> set[str]:
    """The metrics that a PromQL query reads; `$variables` of Grafana may stand in it."""
    bare = _QUOTED.sub('""', query)
    for pattern in (_BRACED, _GROUPING):
        bare = pattern.sub(" ", bare)
    bare = re.sub(r"\$\w+|\b\d+(\.\d+)?(e[+-]?\d+|[smhdwy]|ms)?\b", " ", bare)
    return {name for name in _NAME.findall(bare) if name not in _WORDS}


@cache
def known_metrics() -> frozenset[str]:
    """Every metric that the router or Ray Serve exports."""
    return frozenset([*router_metrics(), *ray_serve_metrics(), *PROMETHEUS_OWN])


def router_metrics() -> set[str]:
    """Of the registry of a router that was made and not started."""

    async def collect() -> set[str]:
        router = Router(parse_settings({"pools": [{"name": "any", "address": "127.0.0.1:9"}]}))
        families = list(router.metrics.registry.collect())
        await router.stop()
        return {family.name + suffix for family in families for suffix in SUFFIXES[family.type.capitalize()]}

    return asyncio.run(collect())


def ray_serve_metrics() -> Iterator[str]:
    """Of every metric that the installed Ray Serve makes with a fixed name."""
    spec = find_spec("ray")
    assert spec is not None and spec.origin is not None
    for path in sorted((Path(spec.origin).parent / "serve").rglob("*.py")):
        if "tests" not in path.parts:
            yield from _made_in(path.read_text())


def unknown_metrics(queries: Iterable[str]) -> list[str]:
    """One line for each metric that a query reads and nobody exports."""
    known = known_metrics()
    return [
        f"nobody exports {name}, which is asked for in: {query}"
        for query in queries
        for name in sorted(metrics_of(query) - known)
    ]


def _made_in(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name | ast.Attribute):
            continue
        kind = node.func.attr if isinstance(node.func, ast.Attribute) else node.func.id
        named = [keyword.value for keyword in node.keywords if keyword.arg == "name"]
        first = (node.args[:1] or named)[:1]
        if kind in SUFFIXES and first and isinstance(first[0], ast.Constant) and isinstance(first[0].value, str):
            for suffix in SUFFIXES[kind]:
                yield RAY_PREFIX + first[0].value.removesuffix(suffix) + suffix
