"""All that one replica chose, proved and counted, as plain data."""

import platform
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import metadata

import encoder
from encoder.attention.resolve import ResolvedBackend
from encoder.device import Device
from encoder.graphs.runner import GraphRecord
from encoder.selfcheck import CheckResult

REPORTED_PACKAGES = ("torch", "transformers", "openvino", "ray", "torch-npu", "flash-attn", "grpcio")


@dataclass(frozen=True)
class ModelInfo:
    """What is served: `dimensions` of a full vector, `max_tokens` of a text (0 for pictures).

    `token_dimensions`: components of a patch's features, 0 when the tower gives none. `token_features`: what they are.
    """

    name: str
    revision: str
    family: str
    tower: str
    dimensions: int
    fingerprint: str
    preprocessing: Mapping[str, object]
    mask_needs: tuple[str, ...]
    max_tokens: int
    compute_dtype: str
    max_batch: int
    logit_scale: float = 0.0
    token_dimensions: int = 0
    token_features: str = ""
    vision_only: bool = False


@dataclass(frozen=True)
class Report:
    """The report of one engine; `startup` holds (stage, milliseconds) in order."""

    model: ModelInfo
    device: Device
    versions: Mapping[str, str]
    backend: ResolvedBackend
    fallback: str
    graphs: tuple[GraphRecord, ...]
    self_checks: tuple[CheckResult, ...]
    startup: tuple[tuple[str, float], ...]
    items_per_second: float
    counters: Mapping[str, int]
    notes: tuple[str, ...] = field(default=())


def installed_versions() -> dict[str, str]:
    """Versions of what decides the vectors and is installed."""
    versions = {"vitfleet": encoder.__version__, "python": platform.python_version()}
    for package in REPORTED_PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions
