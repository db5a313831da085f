"""The manifests as they are: every check passes, and what they say together holds."""

from collections.abc import Iterator

import pytest
import yaml

from deployments.settings import ServeSettings, serve_environment
from k8s.checks.placement import node_types
from k8s.checks.rayservice import read_pools
from k8s.checks.render import Document, kustomizations
from k8s.validate import CONFIGS, validate
from tests.k8s.objects import cluster, container, group, one

FLEETS = {
    "cpu": {"vision-cpu", "text"},
    "gpu": {"vision-gpu", "text"},
    "npu": {"vision-npu", "text"},
    "mixed": {"vision-gpu", "vision-npu", "vision-cpu", "text"},
    "mixed-redis": {"vision-gpu", "vision-npu", "vision-cpu", "text"},
}
each_fleet = pytest.mark.parametrize("name", FLEETS)


def test_every_kustomization_is_known():
    assert set(kustomizations()) == {*FLEETS, "monitoring"}


@pytest.mark.parametrize("name", [*FLEETS, "monitoring"])
def test_every_check_passes(name, rendered, definitions):
    findings = list(validate(name, rendered(name), definitions))
    assert [(finding.name, finding.check, finding.problems) for finding in findings if finding.problems] == []
    assert len({(finding.kind, finding.name) for finding in findings}) == len(rendered(name))


@each_fleet
def test_the_ray_service_fits_its_crd(name, rendered, definitions):
    if missing := definitions.missing("RayService"):
        pytest.skip(missing)
    (schema,) = [
        finding
        for finding in validate(name, rendered(name), definitions)
        if (finding.kind, finding.check) == ("RayService", "schema")
    ]
    assert schema.result == "ok (5 CEL rules not evaluated)"


@each_fleet
def test_pools_are_those_of_the_fleet(name, rendered):
    assert {pool.name for pool in read_pools(one(rendered(name), "RayService")["spec"]["serveConfigV2"])} == FLEETS[
        name
    ]


@pytest.mark.parametrize("name", ["gpu", "npu", "mixed"])
def test_the_config_inside_is_the_projects_own(name, rendered):
    assert one(rendered(name), "RayService")["spec"]["serveConfigV2"] == (CONFIGS / f"{name}.yaml").read_text()


def test_the_cpu_fleet_has_the_pools_of_the_mixed_one(rendered):
    pools = {pool.name: pool for pool in read_pools(one(rendered("mixed"), "RayService")["spec"]["serveConfigV2"])}
    for pool in read_pools(one(rendered("cpu"), "RayService")["spec"]["serveConfigV2"]):
        assert pool == pools[pool.name]


@each_fleet
def test_ray_processes_have_the_projects_environment(name, rendered):
    documents = rendered(name)
    expected = serve_environment(ServeSettings(), None, None)
    for holder in (cluster(documents)["headGroupSpec"], *cluster(documents)["workerGroupSpecs"]):
        (source,) = container(holder)["envFrom"]
        assert one(documents, "ConfigMap", source["configMapRef"]["name"])["data"] == expected


def test_autoscaler_v2_with_an_idle_timeout(rendered):
    spec = cluster(rendered("mixed"))
    assert spec["enableInTreeAutoscaling"] is True
    assert (spec["autoscalerOptions"]["version"], spec["autoscalerOptions"]["idleTimeoutSeconds"]) == ("v2", 300)
    for item in spec["workerGroupSpecs"]:
        assert 1 <= item["minReplicas"] <= item["replicas"] < item["maxReplicas"] and item["idleTimeoutSeconds"] > 0


def test_what_ray_makes_of_the_worker_groups(rendered):
    """Ray's own reader is the oracle: the device plugin's limit alone would give it no NPU."""
    nodes = node_types(cluster(rendered("mixed")))
    devices = {name: {"GPU", "NPU"} & set(node.resources) for name, node in nodes.items()}
    assert devices == {"headgroup": set(), "cpu": set(), "gpu": {"GPU"}, "npu": {"NPU"}}
    assert nodes["npu"].resources["NPU"] == nodes["gpu"].resources["GPU"] == 1
    assert nodes["headgroup"].resources["CPU"] == 0
    assert nodes["npu"].labels == {"vitfleet.io/device": "npu"}
    limits = {name: container(group(rendered("mixed"), name))["resources"]["limits"] for name in ("gpu", "npu")}
    assert (limits["gpu"]["nvidia.com/gpu"], limits["npu"]["huawei.com/Ascend910"]) == (1, 1)


def test_accelerator_nodes_are_chosen_and_their_taints_borne(rendered):
    for name, key in (("gpu", "nvidia.com/gpu"), ("npu", "huawei.com/Ascend910")):
        pod = group(rendered("mixed"), name)["template"]["spec"]
        assert pod["nodeSelector"]
        assert pod["tolerations"] == [{"key": key, "operator": "Exists", "effect": "NoSchedule"}]


def test_redis_keeps_the_heads_state(rendered):
    documents = rendered("mixed-redis")
    options = cluster(documents)["gcsFaultToleranceOptions"]
    host, _, port = options["redisAddress"].partition(":")
    assert one(documents, "Service", "vitfleet-redis")["metadata"]["name"] == host
    assert str(container(one(documents, "StatefulSet"))["ports"][0]["containerPort"]) == port
    secret = options["redisPassword"]["valueFrom"]["secretKeyRef"]
    assert container(one(documents, "StatefulSet"))["env"][0]["valueFrom"]["secretKeyRef"] == secret
    budgets = {item["metadata"]["name"] for item in documents if item["kind"] == "PodDisruptionBudget"}
    assert "vitfleet-head" not in budgets
    assert "vitfleet-head" in {item["metadata"]["name"] for item in rendered("mixed")}


def test_routers_are_probed_by_the_health_protocol(rendered):
    plain = container(one(rendered("cpu"), "Deployment"))
    assert plain["startupProbe"]["grpc"] == {"port": 50051, "service": "encoder.v1.EncoderService"}
    encrypted = one(rendered("gpu"), "Deployment")
    probe = container(encrypted)["startupProbe"]
    assert "grpc" not in probe and probe["exec"]["command"][-1] == "/etc/vitfleet/probe/probe.py"
    (volume,) = [item for item in encrypted["spec"]["template"]["spec"]["volumes"] if item["name"] == "probe"]
    assert "probe.py" in one(rendered("gpu"), "ConfigMap", volume["configMap"]["name"])["data"]


def test_the_number_of_routers_is_the_autoscalers(rendered):
    documents = rendered("gpu")
    scaler = one(documents, "HorizontalPodAutoscaler")["spec"]
    router = one(documents, "Deployment", "vitfleet-router")
    assert scaler["scaleTargetRef"]["name"] == router["metadata"]["name"]
    assert "replicas" not in router["spec"] and scaler["minReplicas"] >= 2
    (port,) = one(documents, "Service", "vitfleet-router")["spec"]["ports"]
    assert (port["port"], port["appProtocol"]) == (50051, "grpc")


class TestSelectors:
    """A selector that matches no pod is a service without ends, a budget without effect, a wall around nothing."""

    @each_fleet
    def test_every_selector_finds_pods(self, name, rendered):
        documents = rendered(name)
        pods = list(pod_labels(documents)) + list(pod_labels_of_the_operator())
        for where, selector in selectors([*documents, *rendered("monitoring")]):
            assert any(matches(selector, labels) for labels in pods), (where, selector)

    def test_nothing_is_allowed_but_what_is_named(self, rendered):
        deny = one(rendered("cpu"), "NetworkPolicy", "default-deny")["spec"]
        assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}

    def test_only_routers_reach_serve_and_only_heads_the_api(self, rendered):
        ray = one(rendered("cpu"), "NetworkPolicy", "ray")["spec"]
        grpc = [rule for rule in ray["ingress"] if {"port": 9000, "protocol": "TCP"} in rule.get("ports", [])]
        assert [rule["from"][0]["podSelector"]["matchLabels"]["app.kubernetes.io/component"] for rule in grpc] == [
            "router"
        ]
        api = one(rendered("cpu"), "NetworkPolicy", "head-to-kubernetes-api")["spec"]
        assert api["podSelector"]["matchLabels"]["ray.io/node-type"] == "head"


def pod_labels(documents: list[Document]) -> Iterator[dict[str, str]]:
    """Labels of the pods, with those that KubeRay adds."""
    for item in documents:
        if item["kind"] in {"Deployment", "StatefulSet"}:
            yield item["spec"]["template"]["metadata"]["labels"]
    spec = cluster(documents)
    yield spec["headGroupSpec"]["template"]["metadata"]["labels"] | {"ray.io/node-type": "head"}
    for item in spec["workerGroupSpecs"]:
        kuberay = {"ray.io/node-type": "worker", "ray.io/group": item["groupName"]}
        yield item["template"]["metadata"]["labels"] | item["labels"] | kuberay


def pod_labels_of_the_operator() -> Iterator[dict[str, str]]:
    yield {"app.kubernetes.io/name": "kuberay-operator"}
    # A caller, and the name server.
    yield {"vitfleet.io/client": "true"}
    yield {"k8s-app": "kube-dns"}


def selectors(documents: list[Document]) -> Iterator[tuple[str, Document]]:
    for item in documents:
        where, spec = item["metadata"]["name"], item.get("spec", {})
        if item["kind"] == "Service":
            yield where, {"matchLabels": spec["selector"]}
        elif item["kind"] in {"PodDisruptionBudget", "Deployment", "StatefulSet", "PodMonitor"}:
            yield where, spec["selector"]
        elif item["kind"] == "NetworkPolicy":
            yield where, spec["podSelector"]
            for rule in [*spec.get("ingress", []), *spec.get("egress", [])]:
                for peer in [*rule.get("from", []), *rule.get("to", [])]:
                    if "podSelector" in peer:
                        yield where, peer["podSelector"]


def matches(selector: Document, labels: dict[str, str]) -> bool:
    listed = selector.get("matchExpressions", [])
    assert all(term["operator"] == "In" for term in listed)
    return selector.get("matchLabels", {}).items() <= labels.items() and all(
        labels.get(term["key"]) in term["values"] for term in listed
    )


def test_no_image_and_no_secret_is_hidden_in_the_manifests(rendered):
    for name in FLEETS:
        documents = rendered(name)
        assert "Secret" not in {item["kind"] for item in documents}
        assert "PRIVATE KEY" not in yaml.safe_dump_all(documents)
