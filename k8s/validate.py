"""Checks the manifests without a cluster: `python -m k8s.validate [--crd FILE]... [NAME ...]`.

Renders each kustomization with kubectl and holds every object against what is known of its kind: Kubernetes' schemas,
KubeRay's CRD with unknown fields refused, the pools' and the router's own settings, Ray's own autoscaler, and the
names of metrics. CEL rules of the CRD are counted, not evaluated, and PromQL is not parsed.
"""

import argparse
import logging
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from rich.console import Console
from rich.table import Table

from encoder.errors import InvalidInput
from k8s.checks import router
from k8s.checks.core import core_problems
from k8s.checks.monitoring import DASHBOARD_LABEL, VALIDATORS, dashboard_problems, monitoring_problems
from k8s.checks.placement import placement_problems
from k8s.checks.pods import WORKLOADS, pod_problems
from k8s.checks.rayservice import environment_problems, operator_problems, read_pools
from k8s.checks.render import K8S, Document, kustomizations, render
from k8s.checks.schema import CustomResource, load_definition

# Not part of the project: it is KubeRay 1.7.0's own file, of one megabyte.
DEFAULT_CRD = K8S.parents[1] / "shared" / "data" / "kuberay-v1.7.0-ray.io_rayservices.yaml"
CONFIGS = K8S.parent / "deployments" / "configs"
EXIT_FAILED = 1


@dataclass(frozen=True)
class Finding:
    """One check of one object; `skipped` says why it was not made, `note` what it leaves open."""

    overlay: str
    kind: str
    name: str
    check: str
    problems: tuple[str, ...] = ()
    skipped: str = ""
    note: str = ""

    @property
    def result(self) -> str:
        if self.skipped:
            return "skipped"
        return "failed" if self.problems else f"ok{self.note and f' ({self.note})'}"

    def lines(self) -> Iterator[str]:
        """What is wrong, and what was skipped: each a line that stands for itself."""
        for line in filter(None, [*self.problems, self.skipped and f"skipped, {self.skipped}"]):
            yield f"{self.overlay}: {self.kind} {self.name}: {self.check}: {line}"


class Definitions:
    """CRDs by the kind that they define. Raises InvalidInput for a file that is there and cannot be read."""

    def __init__(self, paths: Sequence[Path]) -> None:
        loaded = [load_definition(path) for path in paths if path.exists()]
        self._known = {definition["spec"]["names"]["kind"]: definition for definition in loaded}
        self._read: dict[tuple[str, str], CustomResource] = {}
        self._absent = ", ".join(str(path) for path in paths if not path.exists())

    def missing(self, kind: str) -> str:
        """Why there is none for that kind; empty when there is one."""
        if kind in self._known:
            return ""
        return f"no CRD for {kind} is here{self._absent and f' (looked for {self._absent})'}: name one with --crd"

    def of(self, document: Document) -> CustomResource:
        """For a kind that is not missing. Raises InvalidInput for a version that the CRD does not have."""
        kind, version = document["kind"], document["apiVersion"].rpartition("/")[2]
        if (kind, version) not in self._read:
            self._read[kind, version] = CustomResource(self._known[kind], version)
        return self._read[kind, version]


def validate(overlay: str, documents: list[Document], definitions: Definitions) -> Iterator[Finding]:
    """All findings for the objects of one kustomization."""
    for document in documents:
        kind = document["kind"]
        if kind in VALIDATORS:
            yield _check(overlay, document, "fields", partial(monitoring_problems, document))
            yield _custom(overlay, document, definitions)
            continue
        if kind == "RayService":
            yield _custom(overlay, document, definitions)
            yield from _ray_service(overlay, document, documents)
        else:
            yield _check(overlay, document, "schema", partial(core_problems, document))
        if kind in {*WORKLOADS, "RayService"}:
            yield _check(overlay, document, "pods", partial(pod_problems, document))
        if DASHBOARD_LABEL in document["metadata"].get("labels", {}):
            yield _check(overlay, document, "dashboard", partial(dashboard_problems, document))


def _custom(overlay: str, document: Document, definitions: Definitions) -> Finding:
    """A custom resource against its CRD."""
    kind, name = document["kind"], document["metadata"]["name"]
    if missing := definitions.missing(kind):
        return Finding(overlay, kind, name, "schema", skipped=missing)
    try:
        resource = definitions.of(document)
    except InvalidInput as error:
        return Finding(overlay, kind, name, "schema", (str(error),))
    note = f"{resource.rules} CEL rules not evaluated" if resource.rules else ""
    return _check(overlay, document, "schema", partial(resource.problems, document), note)


def _ray_service(overlay: str, service: Document, documents: list[Document]) -> Iterator[Finding]:
    name, text = service["metadata"]["name"], service["spec"]["serveConfigV2"]
    yield _check(overlay, service, "operator", partial(operator_problems, service))
    yield _check(overlay, service, "environment", partial(environment_problems, service, documents))
    yield _check(overlay, service, "config", partial(_config_problems, overlay, text))
    try:
        pools = read_pools(text)
    except InvalidInput as error:
        yield Finding(overlay, "RayService", name, "pools", (str(error),))
        return
    names = [pool.name for pool in pools]
    yield Finding(overlay, "RayService", name, "pools", note=", ".join(names))
    cluster = service["spec"]["rayClusterConfig"]
    yield _check(overlay, service, "placement", partial(placement_problems, cluster, pools))
    for document in documents:
        if document["kind"] == "Deployment" and document["metadata"]["name"] == router.NAME:
            problems = partial(router.router_problems, document, documents, names, name)
            yield _check(overlay, document, "settings", problems)


def _check(
    overlay: str, document: Document, check: str, problems: Callable[[], Sequence[str]], note: str = ""
) -> Finding:
    """An object that a check cannot even read is a problem of its own."""
    found: Sequence[str]
    try:
        found = problems()
    except InvalidInput as error:
        found = [str(error)]
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        found = [f"cannot be read: {type(error).__name__} {error}"]
    return Finding(overlay, document["kind"], document["metadata"]["name"], check, tuple(found), note=note)


def _config_problems(overlay: str, text: str) -> list[str]:
    """An overlay named after one of the project's configs has that config; mixed-redis is mixed with more around it."""
    path = CONFIGS / f"{overlay.partition('-')[0]}.yaml"
    if path.exists() and text != path.read_text():
        return [f"serve-config.yaml differs from {path.relative_to(K8S.parent)}: copy that over"]
    return []


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints a table; returns 0 when no check failed, 1 when one did."""
    known = kustomizations()
    parser = argparse.ArgumentParser(prog="python -m k8s.validate", description="Checks the manifests offline.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(known)}; none: all")
    parser.add_argument(
        "--crd",
        type=Path,
        action="append",
        metavar="FILE",
        help=f"a CRD to check against, may be given more than once; none: {DEFAULT_CRD}",
    )
    parsed = parser.parse_args(arguments)
    if unknown := set(parsed.names) - known.keys():
        parser.error(f"there is no {', '.join(sorted(unknown))}: choose of {', '.join(known)}")
    logging.getLogger("ray").setLevel(logging.WARNING)
    warnings.simplefilter("ignore", DeprecationWarning)
    try:
        definitions = Definitions(parsed.crd or [DEFAULT_CRD])
    except InvalidInput as error:
        parser.error(str(error))
    findings: list[Finding] = []
    for name in parsed.names or known:
        try:
            findings += validate(name, render(known[name]), definitions)
        except InvalidInput as error:
            findings.append(Finding(name, "-", "-", "render", (str(error),)))
    _show(findings)
    return EXIT_FAILED if any(finding.problems for finding in findings) else 0


def _show(findings: Sequence[Finding]) -> None:
    table = Table("kustomization", "kind", "name", "check", "result")
    for finding in findings:
        style = "red" if finding.problems else "yellow" if finding.skipped else None
        table.add_row(finding.overlay, finding.kind, finding.name, finding.check, finding.result, style=style)
    counted = {
        "passed": sum(not finding.problems and not finding.skipped for finding in findings),
        "failed": sum(bool(finding.problems) for finding in findings),
        "skipped": sum(bool(finding.skipped) for finding in findings),
    }
    console = Console(width=None if sys.stdout.isatty() else 160)
    console.print(table)
    for finding in findings:
        for line in finding.lines():
            console.print(line, soft_wrap=True, markup=False)
    console.print(", ".join(f"{count} {word}" for word, count in counted.items()))


if __name__ == "__main__":
    sys.exit(main())
