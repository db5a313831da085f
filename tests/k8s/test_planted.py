"""Errors that are planted into the manifests, each of which has to be found, by the check that is there for it."""

import json
from collections.abc import Callable

import pytest
import yaml

from k8s.checks.render import Document
from k8s.validate import main, validate
from tests.k8s.objects import cluster, container, group, one

Plant = Callable[[list[Document]], object]
ROUTER = "vitfleet-router"


def in_pool(pool: str, **changes: object) -> Plant:
    """Changes the arguments of one pool of the Serve config inside."""

    def plant(documents: list[Document]) -> None:
        spec = one(documents, "RayService")["spec"]
        config = yaml.safe_load(spec["serveConfigV2"])
        (app,) = [item for item in config["applications"] if item["name"] == pool]
        app["args"] |= changes
        spec["serveConfigV2"] = yaml.safe_dump(config)

    return plant


def in_config(**changes: object) -> Plant:
    def plant(documents: list[Document]) -> None:
        spec = one(documents, "RayService")["spec"]
        spec["serveConfigV2"] = yaml.safe_dump(yaml.safe_load(spec["serveConfigV2"]) | changes)

    return plant


def in_router_settings(**changes: object) -> Plant:
    def plant(documents: list[Document]) -> None:
        data = next(
            item["data"] for item in documents if item["kind"] == "ConfigMap" and "router.yaml" in item.get("data", {})
        )
        data["router.yaml"] = yaml.safe_dump(yaml.safe_load(data["router.yaml"]) | changes)

    return plant


def router(documents: list[Document]) -> Document:
    return one(documents, "Deployment", ROUTER)


def pod(holder: Document) -> Document:
    spec: Document = holder.get("spec", holder)["template"]["spec"]
    return spec


def change_environment(documents: list[Document]) -> None:
    one(documents, "ConfigMap", "vitfleet-serve-environment")["data"]["RAY_SERVE_ENABLE_HA_PROXY"] = "0"


SCHEMA = {
    "unknown field of a core kind": (
        lambda d: router(d)["spec"].update(replica=2),
        ("Deployment", "schema", "replica"),
    ),
    "unknown field deep in a core kind": (
        lambda d: container(router(d)).update(imagePullPolicyy="Always"),
        ("Deployment", "schema", "imagePullPolicyy"),
    ),
    "wrong type in a core kind": (
        lambda d: one(d, "HorizontalPodAutoscaler")["spec"].update(maxReplicas="ten"),
        ("HorizontalPodAutoscaler", "schema", "maxReplicas"),
    ),
    "a kind that nobody knows": (
        lambda d: one(d, "Service", ROUTER).update(kind="Servise"),
        ("Servise", "schema", "find schema"),
    ),
}
CRD = {
    "unknown field of a RayService": (
        lambda d: one(d, "RayService")["spec"].update(serveConfigV3=""),
        ("RayService", "schema", "serveConfigV3"),
    ),
    "unknown field of a worker group": (
        lambda d: group(d, "npu").update(maxReplica=9),
        ("RayService", "schema", "maxReplica"),
    ),
    "unknown field of a pod in it": (
        lambda d: container(group(d, "gpu")).update(resource={}),
        ("RayService", "schema", "resource"),
    ),
    "wrong type in it": (
        lambda d: cluster(d)["autoscalerOptions"].update(idleTimeoutSeconds="soon"),
        ("RayService", "schema", "idleTimeoutSeconds"),
    ),
    "a value that is not in the list": (
        lambda d: cluster(d)["autoscalerOptions"].update(version="v3"),
        ("RayService", "schema", "autoscalerOptions.version"),
    ),
    "something that must be there": (
        lambda d: group(d, "cpu").pop("template"),
        ("RayService", "schema", "template"),
    ),
}
FLEET = {
    "target at the slots": (
        in_pool("vision-gpu", max_ongoing_requests=64),
        ("RayService", "pools", "target_ongoing_requests=64 must be below max_ongoing_requests=64"),
    ),
    "unknown setting of a pool": (in_pool("text", replicas=2), ("RayService", "pools", "replicas")),
    "unknown setting of an engine": (
        in_pool("text", engine={"modle": "demo"}),
        ("RayService", "pools", "engine.modle"),
    ),
    "pool and application differ": (in_pool("text", name="texts"), ("RayService", "pools", "give both one name")),
    "unknown key of Serve": (in_config(proxy_locations="EveryNode"), ("RayService", "pools", "proxy_locations")),
    "proxies only on the head": (in_config(proxy_location="HeadOnly"), ("RayService", "pools", "EveryNode")),
    "a port nobody listens on": (in_config(grpc_options={"port": 9001}), ("RayService", "pools", "gRPC 9000")),
    "a config of its own": (in_pool("text", num_cpus=1), ("RayService", "config", "differs from deployments/configs")),
    "another environment": (change_environment, ("RayService", "environment", "RAY_SERVE_ENABLE_HA_PROXY is '0'")),
    "no environment": (
        lambda d: container(group(d, "npu")).pop("envFrom"),
        ("RayService", "environment", "group npu: RAY_SERVE_ENABLE_HA_PROXY is None"),
    ),
    "a device Ray is not told of": (
        lambda d: group(d, "npu").pop("resources"),
        ("RayService", "operator", "the limit huawei.com/Ascend910 is 1, but Ray's resource NPU is None"),
    ),
    "resources in rayStartParams": (
        lambda d: group(d, "npu")["rayStartParams"].update(resources='{"NPU": 1}'),
        ("RayService", "operator", "JSON in rayStartParams"),
    ),
    "a port without the name KubeRay looks for": (
        lambda d: container(cluster(d)["headGroupSpec"])["ports"][3].update(name="grpc"),
        ("RayService", "operator", "group head: the container needs port 9000 under the name serve-grpc"),
    ),
    "no time to move replicas": (
        lambda d: pod(group(d, "gpu")).update(terminationGracePeriodSeconds=60),
        ("RayService", "operator", "group gpu: terminationGracePeriodSeconds 60 cuts drain-node 300 short"),
    ),
    "no node for a pool": (
        lambda d: group(d, "gpu")["labels"].update({"vitfleet.io/device": "cpu"}),
        ("RayService", "placement", "pool vision-gpu: no worker group has what one replica asks for"),
    ),
    "an accelerator no group has": (
        in_pool("vision-gpu", accelerator_type="H200"),
        ("RayService", "placement", "accelerator_type:H200 0.001"),
    ),
    "too few nodes for all pools": (
        lambda d: group(d, "cpu").update(maxReplicas=2),
        ("RayService", "placement", "(cpu 2, gpu 4, npu 4) cannot hold all pools at their largest"),
    ),
}
ROUTERS = {
    "unknown setting": (in_router_settings(pool=[]), ("Deployment", "settings", "pool: no such setting")),
    "a pool that is not served": (
        in_router_settings(pools=[{"name": "vision-tpu", "address": "dns:///vitfleet-serve-svc:9000"}]),
        ("Deployment", "settings", "name the pools vision-tpu; the RayService serves text, vision-cpu"),
    ),
    "a pool at another Service": (
        in_router_settings(pools=[{"name": "text", "address": "dns:///other:9000"}]),
        ("Deployment", "settings", "pool text is asked at dns:///other:9000"),
    ),
    "a file that is not mounted": (
        in_router_settings(tls={"certificate": "/etc/tls/tls.crt", "key": "/etc/vitfleet/tls/tls.key"}),
        ("Deployment", "settings", "/etc/tls/tls.crt, which no volume brings"),
    ),
    "no time to drain": (
        in_router_settings(drain={"notice_s": 5, "grace_s": 60}),
        ("Deployment", "settings", "cuts the drain short: it may take 75 s"),
    ),
    "only this pod itself can call": (
        in_router_settings(host="127.0.0.1"),
        ("Deployment", "settings", "must be 0.0.0.0"),
    ),
    "another port": (in_router_settings(port=50052), ("Deployment", "settings", "not those of the settings")),
}
PODS = {
    "root": (
        lambda d: pod(router(d))["securityContext"].update(runAsUser=0),
        ("Deployment", "pods", "not root"),
    ),
    "a writable image": (
        lambda d: container(group(d, "gpu"))["securityContext"].update(readOnlyRootFilesystem=False),
        ("RayService", "pods", "gpu: container ray can write to its image"),
    ),
    "capabilities": (
        lambda d: container(group(d, "cpu"))["securityContext"].pop("capabilities"),
        ("RayService", "pods", "cpu: container ray keeps capabilities"),
    ),
    "a token": (
        lambda d: pod(group(d, "npu")).pop("automountServiceAccountToken"),
        ("RayService", "pods", "npu: mounts a service account's token"),
    ),
    "the newest image": (
        lambda d: container(router(d)).update(image="vitfleet/router:latest"),
        ("Deployment", "pods", "without a fixed tag"),
    ),
    "an image without a tag": (
        lambda d: container(router(d)).update(image="registry:5000/router"),
        ("Deployment", "pods", "without a fixed tag"),
    ),
    "no bound on memory": (
        lambda d: container(cluster(d)["headGroupSpec"])["resources"]["limits"].pop("memory"),
        ("RayService", "pods", "head: container ray has no limits for memory"),
    ),
}


ALL = {**SCHEMA, **FLEET, **ROUTERS, **PODS}


@pytest.mark.parametrize(("plant", "expected"), ALL.values(), ids=ALL)
def test_planted_errors_are_found(plant, expected, rendered, definitions):
    assert expected[2] in problems_of("mixed", plant, rendered, definitions).get(expected[:2], "")


@pytest.mark.parametrize(("plant", "expected"), CRD.values(), ids=CRD)
def test_what_the_crd_does_not_know_is_found(plant, expected, rendered, definitions):
    if missing := definitions.missing("RayService"):
        pytest.skip(missing)
    assert expected[2] in problems_of("mixed", plant, rendered, definitions).get(expected[:2], "")


def rules(documents: list[Document]) -> list[Document]:
    found: list[Document] = one(documents, "PrometheusRule")["spec"]["groups"][0]["rules"]
    return found


def in_dashboard(change: Callable[[Document], object]) -> Plant:
    def plant(documents: list[Document]) -> None:
        data = one(documents, "ConfigMap", "vitfleet-dashboard")["data"]
        dashboard = json.loads(data["vitfleet.json"])
        change(next(panel for panel in dashboard["panels"] if panel["type"] != "row"))
        data["vitfleet.json"] = json.dumps(dashboard)

    return plant


MONITORING = {
    "a metric nobody exports": (
        lambda d: rules(d)[0].update(expr="sum(rate(vitfleet_router_cals_total[5m])) > 0"),
        ("PrometheusRule", "fields", "nobody exports vitfleet_router_cals_total"),
    ),
    "open brackets": (
        lambda d: rules(d)[0].update(expr="sum(rate(vitfleet_router_calls_total[5m]) > 0"),
        ("PrometheusRule", "fields", "brackets do not match"),
    ),
    "unknown field of a rule": (
        lambda d: rules(d)[0].update(form="10m"),
        ("PrometheusRule", "fields", "form"),
    ),
    "a duration in words": (lambda d: rules(d)[0].update({"for": "soon"}), ("PrometheusRule", "fields", "soon")),
    "an alert twice": (
        lambda d: rules(d)[1].update(alert=rules(d)[0]["alert"]),
        ("PrometheusRule", "fields", "is there 2 times"),
    ),
    "unknown field of a monitor": (
        lambda d: one(d, "PodMonitor", ROUTER)["spec"].update(podMetricEndpoints=[]),
        ("PodMonitor", "fields", "podMetricEndpoints"),
    ),
    "a panel with such a metric": (
        in_dashboard(lambda panel: panel["targets"][0].update(expr="ray_serve_replicas")),
        ("ConfigMap", "dashboard", "nobody exports ray_serve_replicas"),
    ),
    "a panel without a query": (
        in_dashboard(lambda panel: panel.update(targets=[])),
        ("ConfigMap", "dashboard", "asks for nothing"),
    ),
}


@pytest.mark.parametrize(("plant", "expected"), MONITORING.values(), ids=MONITORING)
def test_planted_errors_in_monitoring_are_found(plant, expected, rendered, definitions):
    assert expected[2] in problems_of("monitoring", plant, rendered, definitions).get(expected[:2], "")


def test_tls_needs_a_probe_that_speaks_it(rendered, definitions):
    def plant(documents: list[Document]) -> None:
        container(router(documents))["startupProbe"]["grpc"] = {"port": 50051}

    found = problems_of("gpu", plant, rendered, definitions)
    assert "speaks no TLS" in found["Deployment", "settings"]


def test_the_command_says_failed_and_shows_why(monkeypatch, capsys, rendered, tmp_path):
    broken = rendered("cpu")
    router(broken)["spec"]["replica"] = 2
    monkeypatch.setattr("k8s.validate.render", lambda folder: broken)
    assert main(["cpu", "--crd", str(tmp_path / "none.yaml")]) == 1
    shown = capsys.readouterr().out
    assert "\ncpu: Deployment vitfleet-router: schema: spec: " in shown and "('replica' was unexpected)\n" in shown
    assert "\ncpu: RayService vitfleet: schema: skipped, no CRD for RayService is here (looked for " in shown
    assert "1 failed, 1 skipped" in shown
    with pytest.raises(SystemExit):
        main(["tpu"])
    assert "there is no tpu" in capsys.readouterr().err


def problems_of(name: str, plant: Plant, rendered, definitions) -> dict[tuple[str, str], str]:
    """What is found after `plant`, by (kind, check); the manifests as they are have no problems."""
    documents = rendered(name)
    plant(documents)
    found: dict[tuple[str, str], str] = {}
    for finding in validate(name, documents, definitions):
        if finding.problems:
            key = (finding.kind, finding.check)
            found[key] = "\n".join(filter(None, [found.get(key), *finding.problems]))
    return found
