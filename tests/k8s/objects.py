"""Finding things in rendered manifests."""

from collections.abc import Sequence

from k8s.checks.render import Document


def one(documents: Sequence[Document], kind: str, name: str = "") -> Document:
    """The only object of that kind whose name begins so."""
    found = [item for item in documents if item["kind"] == kind and item["metadata"]["name"].startswith(name)]
    assert len(found) == 1, [item["metadata"]["name"] for item in found]
    return found[0]


def cluster(documents: Sequence[Document]) -> Document:
    """The spec of the Ray cluster."""
    spec: Document = one(documents, "RayService")["spec"]["rayClusterConfig"]
    return spec


def group(documents: Sequence[Document], name: str) -> Document:
    """A worker group."""
    return next(item for item in cluster(documents)["workerGroupSpecs"] if item["groupName"] == name)


def container(group_or_workload: Document) -> Document:
    """The first container of a worker group, of the head, or of a Deployment."""
    holder = group_or_workload.get("spec", group_or_workload)
    first: Document = holder["template"]["spec"]["containers"][0]
    return first
