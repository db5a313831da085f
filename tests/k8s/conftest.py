"""The manifests as kubectl renders them, once for all tests."""

import copy
import logging
from collections.abc import Callable

import pytest

from k8s.checks.render import Document, kustomizations, render
from k8s.validate import DEFAULT_CRD, Definitions

Rendered = Callable[[str], list[Document]]


@pytest.fixture(scope="session", autouse=True)
def _quiet_autoscaler() -> None:
    logging.getLogger("ray").setLevel(logging.WARNING)


@pytest.fixture(scope="session")
def definitions() -> Definitions:
    return Definitions([DEFAULT_CRD])


@pytest.fixture(scope="session")
def rendered() -> Rendered:
    """A fresh copy of the objects of one kustomization, to look at or to break."""
    kept: dict[str, list[Document]] = {}

    def objects(name: str) -> list[Document]:
        if name not in kept:
            kept[name] = render(kustomizations()[name])
        return copy.deepcopy(kept[name])

    return objects
