"""What every pod of the project must hold: no root, no writable image, no needless token, bounds on what it uses."""

from collections.abc import Iterator

from k8s.checks.rayservice import groups_of
from k8s.checks.render import Document

WORKLOADS = {"Deployment", "StatefulSet"}


def pod_problems(document: Document) -> list[str]:
    """Of the pods that `document` makes, KubeRay's additions not counted."""
    return [f"{where}: {problem}" for where, spec, token in _pods(document) for problem in _of_pod(spec, token)]


def _pods(document: Document) -> Iterator[tuple[str, Document, bool]]:
    """(where, pod spec, whether it may have a service account's token)."""
    if document["kind"] in WORKLOADS:
        yield document["metadata"]["name"], document["spec"]["template"]["spec"], False
    elif document["kind"] == "RayService":
        for name, group in groups_of(document["spec"]["rayClusterConfig"]):
            # The autoscaler beside the head talks to the Kubernetes API.
            yield name, group["template"]["spec"], name == "head"


def _of_pod(spec: Document, token: bool) -> Iterator[str]:
    security = spec.get("securityContext", {})
    if security.get("runAsNonRoot") is not True or not security.get("runAsUser"):
        yield "must run as a user that is not root"
    if security.get("seccompProfile", {}).get("type") != "RuntimeDefault":
        yield "needs the seccomp profile RuntimeDefault"
    if not token and spec.get("automountServiceAccountToken") is not False:
        yield "mounts a service account's token that it does not need"
    for container in [*spec["containers"], *spec.get("initContainers", [])]:
        for problem in _of_container(container):
            yield f"container {container['name']} {problem}"


def _of_container(container: Document) -> Iterator[str]:
    security = container.get("securityContext", {})
    if security.get("readOnlyRootFilesystem") is not True:
        yield "can write to its image"
    if security.get("allowPrivilegeEscalation") is not False:
        yield "may gain privileges"
    if security.get("capabilities", {}).get("drop") != ["ALL"]:
        yield "keeps capabilities"
    name, _, tag = container["image"].rpartition(":")
    if not name or "/" in tag or tag == "latest":
        yield f"names the image {container['image']} without a fixed tag"
    resources = container.get("resources", {})
    for bound in ("requests", "limits"):
        missing = {"cpu", "memory"} - resources.get(bound, {}).keys()
        if missing:
            yield f"has no {bound} for {' and '.join(sorted(missing))}"
