"""What a RayService must hold beyond its schema: pools, environment, ports, and the rules of KubeRay's operator."""

from collections.abc import Iterator, Mapping
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError
from ray.serve.schema import HTTPOptionsSchema, ServeApplicationSchema, ServeDeploySchema, gRPCOptionsSchema

from deployments.serve_config import POOL_BUILDER
from deployments.settings import PoolSettings, ServeSettings, parse_pool_settings, serve_environment
from encoder.errors import InvalidInput
from encoder.settings import describe_validation
from k8s.checks.render import Document

GRPC_PORT = ServeSettings().grpc_port
HTTP_PORT = ServeSettings().http_port
HEAD_PORTS = {"gcs-server": 6379, "dashboard": 8265, "serve": HTTP_PORT, "serve-grpc": GRPC_PORT, "metrics": 8080}
WORKER_PORTS = {"serve": HTTP_PORT, "serve-grpc": GRPC_PORT, "metrics": 8080}
# Limits of device plugins, and what Ray calls the device.
DEVICES = {"nvidia.com/gpu": "GPU", "huawei.com/Ascend910": "NPU"}
# KubeRay makes names from it, and 63 characters is what Kubernetes takes.
MAX_NAME_LENGTH = 47
# After preStop, for Ray to end.
SPARE_S = 20


def read_pools(text: str) -> list[PoolSettings]:
    """The pools of a `serveConfigV2`, through Serve's schema and the pools' own settings. Raises InvalidInput."""
    try:
        document = yaml.safe_load(text)
        config = ServeDeploySchema.model_validate(document)
    except yaml.YAMLError as error:
        raise InvalidInput(f"serveConfigV2 is no YAML: {' '.join(str(error).split())}") from None
    except ValidationError as error:
        raise InvalidInput(f"serveConfigV2: {describe_validation(error)}") from None
    if unknown := sorted(_unknown_keys(document)):
        raise InvalidInput(f"serveConfigV2 has keys that Serve ignores: {', '.join(unknown)}")
    if config.grpc_options is None or config.grpc_options.port != GRPC_PORT or config.http_options.port != HTTP_PORT:
        raise InvalidInput(f"serveConfigV2 must set the ports of the pods: HTTP {HTTP_PORT} and gRPC {GRPC_PORT}")
    if config.proxy_location != "EveryNode" or config.http_options.host != "0.0.0.0":
        raise InvalidInput("serveConfigV2 must set proxy_location EveryNode and host 0.0.0.0: probes ask every worker")
    pools = []
    for application in config.applications:
        if application.import_path != POOL_BUILDER:
            raise InvalidInput(f"application {application.name!r} is not built by {POOL_BUILDER}")
        pool = parse_pool_settings(application.args)
        if pool.name != application.name:
            raise InvalidInput(f"application {application.name!r} holds pool {pool.name!r}: give both one name")
        pools.append(pool)
    if not pools:
        raise InvalidInput("serveConfigV2 names no applications")
    return pools


def operator_problems(service: Document) -> list[str]:
    """What KubeRay 1.7.0 refuses or misreads; it says so only once it runs."""
    cluster = service["spec"]["rayClusterConfig"]
    problems = []
    if len(service["metadata"]["name"]) > MAX_NAME_LENGTH:
        problems.append(f"the name is longer than {MAX_NAME_LENGTH} characters")
    for name, group in groups_of(cluster):
        params = group.get("rayStartParams", {})
        twice = sorted({"num-cpus", "num-gpus", "memory", "resources"} & params.keys())
        if twice and group.get("resources"):
            problems.append(f"group {name}: rayStartParams {', '.join(twice)} and `resources` exclude each other")
        if "labels" in params:
            problems.append(f"group {name}: labels belong into the group's `labels`, not into rayStartParams")
        if any("{" in value for value in params.values()):
            problems.append(f"group {name}: JSON in rayStartParams breaks `ray start`; use the group's `resources`")
        if group["template"]["spec"].get("restartPolicy", "Never") != "Never":
            problems.append(f"group {name}: restartPolicy must be Never, or left out, with autoscaler v2")
        if name != "head" and not 0 <= group["minReplicas"] <= group["maxReplicas"]:
            problems.append(f"group {name}: minReplicas is above maxReplicas")
        problems += [*_device_problems(name, group), *_drain_problems(name, group)]
        expected = HEAD_PORTS if name == "head" else WORKER_PORTS
        ports = {port["name"]: port["containerPort"] for port in _container(group).get("ports", [])}
        problems += [
            f"group {name}: the container needs port {port} under the name {known}"
            for known, port in expected.items()
            if ports.get(known) != port
        ]
    return problems


def environment_problems(service: Document, documents: list[Document]) -> list[str]:
    """Every Ray container must have exactly the variables that `serve_environment` gives for the default settings."""
    expected = serve_environment(ServeSettings(), None, None)
    maps = {item["metadata"]["name"]: item.get("data", {}) for item in documents if item["kind"] == "ConfigMap"}
    problems = []
    for name, group in groups_of(service["spec"]["rayClusterConfig"]):
        found = _environment(_container(group), maps)
        for variable in sorted(expected.keys() | found.keys()):
            if expected.get(variable) != found.get(variable):
                problems.append(
                    f"group {name}: {variable} is {found.get(variable)!r}, the project sets {expected.get(variable)!r}"
                )
    return problems


def groups_of(cluster: Document) -> Iterator[tuple[str, Document]]:
    """The head as "head", then the worker groups by their names."""
    yield "head", cluster["headGroupSpec"]
    for group in cluster.get("workerGroupSpecs", []):
        yield group["groupName"], group


def _unknown_keys(document: Document) -> Iterator[str]:
    """Serve's own schema drops them in silence."""
    yield from document.keys() - ServeDeploySchema.model_fields.keys()
    sections: list[tuple[str, type[BaseModel]]] = [
        ("http_options", HTTPOptionsSchema),
        ("grpc_options", gRPCOptionsSchema),
    ]
    for section, schema in sections:
        yield from (f"{section}.{key}" for key in document.get(section, {}).keys() - schema.model_fields.keys())
    for application in document["applications"]:
        unknown = application.keys() - ServeApplicationSchema.model_fields.keys()
        yield from (f"{application['name']}.{key}" for key in unknown)


def _device_problems(name: str, group: Document) -> Iterator[str]:
    limits = _container(group).get("resources", {}).get("limits", {})
    for limit, device in DEVICES.items():
        granted = limits.get(limit)
        # KubeRay reads GPU limits itself; any other device Ray must be told of.
        told = group.get("resources", {}).get(device) if device != "GPU" else granted
        if str(granted) != str(told):
            yield f"group {name}: the limit {limit} is {granted}, but Ray's resource {device} is {told}"


def _drain_problems(name: str, group: Document) -> Iterator[str]:
    command = _container(group).get("lifecycle", {}).get("preStop", {}).get("exec", {}).get("command", ["", 0])
    given = group["template"]["spec"].get("terminationGracePeriodSeconds", 30)
    if given < int(command[-1]) + SPARE_S:
        yield f"group {name}: terminationGracePeriodSeconds {given} cuts {' '.join(command)} short"


def _container(group: Document) -> Document:
    """The first container is Ray's."""
    container: Document = group["template"]["spec"]["containers"][0]
    return container


def _environment(container: Document, maps: Mapping[str, Mapping[str, str]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for source in container.get("envFrom", []):
        found |= maps.get(source["configMapRef"]["name"], {})
    return found | {entry["name"]: entry.get("value") for entry in container.get("env", [])}
