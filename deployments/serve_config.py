"""Reads a Serve config for one machine, checks the pools in it, and sets what the local fleet decides itself."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from deployments.settings import SERVICER_FUNCTION, PoolSettings, ServeSettings, parse_pool_settings
from encoder.errors import CheckpointError, InvalidInput
from encoder.models.checkpoint import find_checkpoint

POOL_BUILDER = "deployments.app:build_pool"


@dataclass(frozen=True)
class ServeConfig:
    """`document` is what Serve takes; `pools` are the settings of its applications."""

    document: dict[str, Any]
    pools: tuple[PoolSettings, ...]


def load_serve_config(path: Path, serve: ServeSettings, engine: Mapping[str, Any]) -> ServeConfig:
    """The config of `path` with the ports and host of `serve` and, in every pool, the engine settings of `engine`.

    Raises InvalidInput with one line.
    """
    try:
        document = yaml.safe_load(path.read_text())
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise InvalidInput(f"Serve config {path} cannot be read: {' '.join(str(error).split())}") from None
    applications = document.get("applications") if isinstance(document, dict) else None
    if not applications or not isinstance(applications, list):
        raise InvalidInput(f"Serve config {path} names no applications: add at least one pool")
    pools = []
    for application in applications:
        if application.get("import_path") != POOL_BUILDER:
            raise InvalidInput(
                f"application {application.get('name')!r} in {path} is not built by {POOL_BUILDER}: only pools can be "
                "served by a local fleet"
            )
        args = application.setdefault("args", {})
        if isinstance(named := args.get("engine") or {}, dict):
            args["engine"] = {**named, **engine}
        pool = parse_pool_settings(args)
        if pool.name != application.get("name"):
            raise InvalidInput(f"application {application.get('name')!r} in {path} holds pool {pool.name!r}: one name")
        pools.append(pool)
    document["proxy_location"] = "EveryNode"
    document["http_options"] = {"host": serve.host, "port": serve.http_port}
    document["grpc_options"] = {"port": serve.grpc_port, "grpc_servicer_functions": [SERVICER_FUNCTION]}
    return ServeConfig(document, tuple(pools))


def without_text_pools(config: ServeConfig) -> ServeConfig:
    """Without the pools for texts whose model is for pictures alone; they could never start.

    A model that cannot be found is left to its pool, which says why.
    """
    kept = [pool for pool in config.pools if pool.engine.tower == "vision" or _has_text(pool)]
    if len(kept) in (0, len(config.pools)):
        return config
    names = {pool.name for pool in kept}
    applications = [one for one in config.document["applications"] if one["name"] in names]
    return ServeConfig(config.document | {"applications": applications}, tuple(kept))


def _has_text(pool: PoolSettings) -> bool:
    engine = pool.engine
    try:
        return find_checkpoint(engine.model, revision=engine.revision, offline=engine.offline).has_text
    except CheckpointError:
        return True


@dataclass(frozen=True)
class Claim:
    """Logical resources that all replicas claim when every pool is at its largest; one CPU more for Serve itself."""

    cpus: int
    gpus: int
    resources: dict[str, float]


def claim_of(pools: Sequence[PoolSettings]) -> Claim:
    """What a local Ray has to offer to hold `pools`; raises InvalidInput for a pool that asks for a labelled node."""
    cpus, gpus = 0.0, 0.0
    resources: defaultdict[str, float] = defaultdict(float)
    for pool in pools:
        if pool.label_selector or pool.accelerator_type:
            raise InvalidInput(
                f"pool {pool.name!r} asks for a node by label_selector or accelerator_type, which one machine does not "
                "have: leave it out here"
            )
        replicas = pool.autoscaling.max_replicas if pool.autoscaling else pool.num_replicas or 1
        cpus += pool.num_cpus * replicas
        gpus += pool.num_gpus * replicas
        for name, amount in pool.resources.items():
            resources[name] += amount * replicas
    return Claim(1 + math.ceil(cpus), math.ceil(gpus), dict(resources))
