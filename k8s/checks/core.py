"""Kubernetes' own kinds against its published schemas, unknown fields refused (PyPI package kubernetes-validate)."""

import json
from functools import cache

import kubernetes_validate  # type: ignore[import-untyped]

from k8s.checks.render import Document

# The oldest release that the manifests are written for: preStop `sleep` is stable from here on.
KUBERNETES_VERSION = "1.34"


def core_problems(document: Document) -> list[str]:
    """The first thing that is wrong, as a list of at most one line."""
    return list(_problems(json.dumps(document, sort_keys=True)))


# Overlays share most of their objects, and each check reads the schemas from disk anew.
@cache
def _problems(text: str) -> tuple[str, ...]:
    try:
        kubernetes_validate.validate(json.loads(text), KUBERNETES_VERSION, strict=True)
    except kubernetes_validate.ValidationError as error:
        where = ".".join(str(part) for part in error.path) or "the object"
        return (f"{where}: {' '.join(error.message.split())[:300]}",)
    except kubernetes_validate.SchemaNotFoundError as error:
        return (error.message,)
    return ()
