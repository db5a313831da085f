"""The router's Deployment against its settings: pools that exist, files that are mounted, time to drain."""

from collections.abc import Collection
from pathlib import PurePosixPath

from deployments.router.settings import RouterSettings, read_settings
from encoder.errors import InvalidInput
from k8s.checks.rayservice import GRPC_PORT
from k8s.checks.render import Document

NAME = "vitfleet-router"
SETTINGS_KEY = "router.yaml"
SPARE_S = 5.0


def router_problems(deployment: Document, documents: list[Document], pools: Collection[str], service: str) -> list[str]:
    """`pools`: the names of the applications that `service`, a RayService, serves."""
    pod = deployment["spec"]["template"]["spec"]
    try:
        settings = _settings(pod, documents)
    except InvalidInput as error:
        return [str(error)]
    problems = []
    address = f"dns:///{service}-serve-svc:{GRPC_PORT}"
    if {pool.name for pool in settings.pools} != set(pools):
        told, served = (", ".join(sorted(names)) for names in ([pool.name for pool in settings.pools], pools))
        problems.append(f"the router's settings name the pools {told}; the RayService serves {served}")
    problems += [
        f"pool {pool.name} is asked at {pool.address}; KubeRay's Service is {address}"
        for pool in settings.pools
        if pool.address != address
    ]
    container = pod["containers"][0]
    mounts = [mount["mountPath"] for mount in container["volumeMounts"]]
    problems += [
        f"the settings name the file {path}, which no volume brings"
        for path in _files(settings)
        if not any(PurePosixPath(path).is_relative_to(mount) for mount in mounts)
    ]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    if (ports.get("grpc"), ports.get("metrics")) != (settings.port, settings.metrics_port):
        problems.append(f"the container's ports {ports} are not those of the settings")
    if {settings.host, settings.metrics_host} != {"0.0.0.0"}:
        problems.append("host and metrics_host must be 0.0.0.0: calls and scrapes come from other pods")
    problems += _drain_problems(pod, settings)
    if settings.tls is not None and "grpc" in container["startupProbe"]:
        problems.append("the kubelet's gRPC probe speaks no TLS: use components/router-tls")
    return problems


def _settings(pod: Document, documents: list[Document]) -> RouterSettings:
    names = [volume["configMap"]["name"] for volume in pod["volumes"] if volume["name"] == "settings"]
    found = [item for item in documents if item["kind"] == "ConfigMap" and item["metadata"]["name"] in names]
    if not found or SETTINGS_KEY not in found[0]["data"]:
        raise InvalidInput(f"the volume `settings` brings no {SETTINGS_KEY}")
    return read_settings(found[0]["data"][SETTINGS_KEY], SETTINGS_KEY)


def _files(settings: RouterSettings) -> list[str]:
    files = []
    if settings.tls is not None:
        files += [settings.tls.certificate, settings.tls.key, settings.tls.client_ca]
    if settings.tokens is not None:
        files.append(settings.tokens.file)
    return [str(path) for path in files if path is not None]


def _drain_problems(pod: Document, settings: RouterSettings) -> list[str]:
    pause = pod["containers"][0].get("lifecycle", {}).get("preStop", {}).get("sleep", {}).get("seconds", 0)
    needed = pause + settings.drain.notice_s + settings.drain.grace_s + SPARE_S
    given = pod["terminationGracePeriodSeconds"]
    if given < needed:
        return [f"terminationGracePeriodSeconds {given} cuts the drain short: it may take {needed:g} s"]
    return []
