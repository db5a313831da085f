"""What a pool says of itself, read from its ListModels and GetBackendReport."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from deployments.router.masks import masks_lacking
from encoder.v1 import encoder_pb2 as pb

TOWER_NAMES = {pb.TOWER_VISION: "vision", pb.TOWER_TEXT: "text"}


@dataclass(frozen=True)
class Inventory:
    """What a pool says of itself; mappings are by tower.

    `dimensions`: of a full vector, 0 where models differ. `lacks`: mask needs its backend does not take itself.
    `proven`: each replica has passed the self-checks of the backend it uses. `replicas` is empty without a report.
    """

    models: Mapping[str, frozenset[str]]
    dimensions: Mapping[str, int]
    lacks: Mapping[str, frozenset[str]]
    revisions: tuple[str, ...] = ()
    fingerprints: frozenset[str] = frozenset()
    replicas: frozenset[str] = frozenset()
    dtypes: frozenset[str] = frozenset()
    proven: bool = False
    items_per_second: float | None = None


def read_inventory(models: Iterable[pb.Model], replicas: Iterable[pb.ReplicaReport]) -> Inventory:
    """Joins what a pool's ListModels and GetBackendReport say; without replicas their part stays empty."""
    reports = list(replicas)
    names: dict[str, set[str]] = {}
    dimensions: dict[str, int] = {}
    needs: dict[str, set[str]] = {}
    revisions: dict[str, None] = {}
    fingerprints, dtypes = set(), set()
    for model in models:
        revisions[model.revision] = None
        for served in model.towers:
            tower = TOWER_NAMES.get(served.tower)
            if tower is None:
                continue
            names.setdefault(tower, set()).add(model.name)
            # Two models in one pool: the size to expect depends on its default, so none is expected.
            differs = dimensions.get(tower, served.dimensions) != served.dimensions
            dimensions[tower] = 0 if differs else served.dimensions
            needs.setdefault(tower, set()).update(served.mask_needs)
            fingerprints.add(served.fingerprint)
            dtypes.add(served.compute_dtype)
    for report in reports:
        revisions[report.model_revision] = None
        fingerprints.add(report.fingerprint)
        dtypes.add(report.compute_dtype)
    return Inventory(
        models={tower: frozenset(found) for tower, found in names.items()},
        dimensions=dimensions,
        lacks={
            tower: masks_lacking(found, [report for report in reports if _of_tower(report, tower)])
            for tower, found in needs.items()
        },
        revisions=tuple(revision for revision in revisions if revision),
        fingerprints=frozenset(fingerprints - {""}),
        replicas=frozenset(report.replica for report in reports),
        dtypes=frozenset(dtypes - {""}),
        proven=bool(reports) and all(_proven(report) for report in reports),
        items_per_second=sum(report.items_per_second for report in reports) or None,
    )


def _of_tower(report: pb.ReplicaReport, tower: str) -> bool:
    return TOWER_NAMES.get(report.tower, tower) == tower


def _proven(report: pb.ReplicaReport) -> bool:
    """Whether self-checks were made, and none failed but those of backends that were given up for it."""
    given_up = {rejected.name for rejected in report.backend.rejected}
    checks = [check for check in report.self_checks if check.backend not in given_up]
    return bool(checks) and all(check.passed for check in checks)
