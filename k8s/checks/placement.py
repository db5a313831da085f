"""Whether the worker groups can hold the pools: asked of Ray's own autoscaler, which reads a RayCluster by itself.

Both the reader and the scheduler are Ray's private code, of the version that the project pins.
"""

import re
from collections.abc import Sequence
from typing import Any

from ray.autoscaler._private.kuberay.autoscaling_config import _generate_available_node_types_from_ray_cr_spec
from ray.autoscaler.v2.instance_manager.config import NodeTypeConfig
from ray.autoscaler.v2.scheduler import ResourceDemandScheduler, SchedulingRequest
from ray.autoscaler.v2.utils import ResourceRequestUtil
from ray.core.generated.autoscaler_pb2 import (  # type: ignore[attr-defined]
    ResourceRequest,
    ResourceRequestByCount,
)
from ray.core.generated.common_pb2 import LabelSelectorOperator  # type: ignore[attr-defined]

from deployments.settings import PoolSettings

HEAD = "headgroup"


def placement_problems(cluster: dict[str, Any], pools: Sequence[PoolSettings]) -> list[str]:
    """Pools whose replicas, when every pool is at its largest, find no node in `cluster` (a RayCluster spec)."""
    groups = node_types(cluster)
    demands = {pool.name: _demand(pool) for pool in pools}
    problems = [
        f"pool {pool.name}: no worker group has what one replica asks for ({_words(demands[pool.name])})"
        for pool in pools
        if not _fits(groups, [(demands[pool.name], 1)])
    ]
    if problems:
        return problems
    if not _fits(groups, [(demands[pool.name], _most(pool)) for pool in pools]):
        sizes = ", ".join(f"{pool.name} {_most(pool)}" for pool in pools)
        room = ", ".join(f"{name} {group.max_worker_nodes}" for name, group in groups.items() if name != HEAD)
        return [f"the worker groups ({room}) cannot hold all pools at their largest ({sizes}): raise maxReplicas"]
    return []


def node_types(cluster: dict[str, Any]) -> dict[str, NodeTypeConfig]:
    """Ray's view of the head and the worker groups: CPU, GPU, NPU, memory, and labels of one node of each."""
    read = _generate_available_node_types_from_ray_cr_spec(cluster)
    return {
        name: NodeTypeConfig(
            name=name,
            min_worker_nodes=group["min_workers"],
            max_worker_nodes=group["max_workers"],
            resources=group["resources"],
            labels=group["labels"],
        )
        for name, group in read.items()
    }


def _most(pool: PoolSettings) -> int:
    return pool.autoscaling.max_replicas if pool.autoscaling else pool.num_replicas or 1


def _demand(pool: PoolSettings) -> ResourceRequest:
    wanted = {"CPU": pool.num_cpus, "GPU": pool.num_gpus, **pool.resources}
    if pool.accelerator_type is not None:
        wanted[f"accelerator_type:{pool.accelerator_type}"] = 0.001
    selector = [_constraint(key, value) for key, value in pool.label_selector.items()]
    return ResourceRequestUtil.make(
        {name: amount for name, amount in wanted.items() if amount}, label_selectors=[selector] if selector else None
    )


def _constraint(key: str, value: str) -> tuple[str, int, list[str]]:
    """Ray's four forms of a selector's value: `a`, `!a`, `in(a,b)`, `!in(a,b)`."""
    negated, value = value.startswith("!"), value.removeprefix("!")
    listed = re.fullmatch(r"in\((.*)\)", value)
    values = [part.strip() for part in listed[1].split(",")] if listed else [value]
    name = "LABEL_OPERATOR_NOT_IN" if negated else "LABEL_OPERATOR_IN"
    return key, LabelSelectorOperator.Value(name), values


def _fits(groups: dict[str, NodeTypeConfig], wanted: Sequence[tuple[ResourceRequest, int]]) -> bool:
    request = SchedulingRequest(
        disable_launch_config_check=True,
        node_type_configs={name: group for name, group in groups.items() if name != HEAD},
        max_num_nodes=sum(group.max_worker_nodes for group in groups.values()),
        resource_requests=[ResourceRequestByCount(request=demand, count=count) for demand, count in wanted],
    )
    return not ResourceDemandScheduler().schedule(request).infeasible_resource_requests


def _words(demand: ResourceRequest) -> str:
    resources = [f"{name} {amount:g}" for name, amount in sorted(demand.resources_bundle.items())]
    labels = [
        f"{constraint.label_key} {' or '.join(constraint.label_values)}"
        for selector in demand.label_selectors
        for constraint in selector.label_constraints
    ]
    return ", ".join(resources + labels)
