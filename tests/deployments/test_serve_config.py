"""The Serve config of a local fleet: what is checked before anything starts, and what the fleet sets itself."""

import json
from pathlib import Path

import pytest
import yaml

from deployments.app import build_pool
from deployments.serve_config import Claim, claim_of, load_serve_config, without_text_pools
from deployments.settings import DEPLOYMENT_NAME, LOCAL_CONFIG, ServeSettings
from encoder.errors import InvalidInput

SERVE = ServeSettings(grpc_port=9100, http_port=8100)


def write(folder: Path, *pools: dict) -> Path:
    applications = [
        {"name": pool.get("name", "?"), "import_path": "deployments.app:build_pool", "args": pool} for pool in pools
    ]
    path = folder / "config.yaml"
    path.write_text(yaml.safe_dump({"applications": applications}))
    return path


def test_the_packaged_config_is_one_that_serve_takes_as_it_is():
    from ray.serve.schema import ServeDeploySchema

    document = yaml.safe_load(LOCAL_CONFIG.read_text())
    schema = ServeDeploySchema.model_validate(document)
    assert [application.name for application in schema.applications] == ["vision-cpu", "text"]
    assert (schema.http_options.host, schema.http_options.port, schema.grpc_options.port) == ("127.0.0.1", 8000, 9000)
    for application in schema.applications:
        assert application.args["name"] == application.name
        assert build_pool(dict(application.args))._bound_deployment.name == DEPLOYMENT_NAME


def test_ports_host_and_engine_settings_are_set():
    config = load_serve_config(LOCAL_CONFIG, SERVE, {"model": "/models/other"})
    assert config.document["grpc_options"]["port"] == 9100
    assert config.document["http_options"] == {"host": "127.0.0.1", "port": 8100}
    assert [pool.engine.model for pool in config.pools] == ["/models/other"] * 2
    assert [a["args"]["engine"]["model"] for a in config.document["applications"]] == ["/models/other"] * 2
    assert [pool.engine.tower for pool in config.pools] == ["vision", "text"]
    assert load_serve_config(LOCAL_CONFIG, SERVE, {}).pools[0].engine.model == "demo"


def checkpoint_of(folder, model_type):
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    (folder / "model.safetensors").write_bytes(b"")
    return str(folder)


def test_a_model_for_pictures_alone_gets_no_pool_for_texts(tmp_path):
    config = load_serve_config(LOCAL_CONFIG, SERVE, {"model": checkpoint_of(tmp_path / "dinov2", "dinov2")})
    found = without_text_pools(config)
    assert [pool.name for pool in found.pools] == ["vision-cpu"]
    assert [application["name"] for application in found.document["applications"]] == ["vision-cpu"]
    assert len(config.document["applications"]) == 2 and found.document["grpc_options"]["port"] == 9100


@pytest.mark.parametrize("model_type", ["clip", "siglip", "aimv2", None])
def test_other_models_keep_their_pool_for_texts(tmp_path, model_type):
    model = checkpoint_of(tmp_path / "model", model_type) if model_type else str(tmp_path / "none")
    config = load_serve_config(LOCAL_CONFIG, SERVE, {"model": model})
    assert without_text_pools(config) is config


@pytest.mark.parametrize(
    ("pool", "words"),
    [
        ({"name": "v", "engine": {}, "replicas": 2}, "settings of pool 'v': replicas"),
        ({"name": "v", "engine": "demo"}, "engine: Input should be"),
    ],
)
def test_a_pool_that_cannot_hold_is_refused(tmp_path, pool, words):
    with pytest.raises(InvalidInput, match=words):
        load_serve_config(write(tmp_path, pool), SERVE, {})


def test_an_engine_that_is_left_out_is_the_demo(tmp_path):
    (pool,) = load_serve_config(write(tmp_path, {"name": "v", "engine": None}), SERVE, {}).pools
    assert (pool.engine.model, pool.engine.tower) == ("demo", "vision")


def test_other_configs_are_refused(tmp_path):
    path = tmp_path / "config.yaml"
    for text, words in (
        ("applications: [", "cannot be read"),
        ("- 1", "names no applications"),
        ("applications: []", "names no applications"),
        ("applications: [{name: x, import_path: 'my.app:app'}]", "application 'x' .* is not built by"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidInput, match=words):
            load_serve_config(path, SERVE, {})
    with pytest.raises(InvalidInput, match="cannot be read"):
        load_serve_config(tmp_path / "none.yaml", SERVE, {})


def test_application_and_pool_have_one_name(tmp_path):
    path = write(tmp_path, {"name": "v", "engine": {}})
    path.write_text(path.read_text().replace("name: v\n", "name: w\n", 1))
    with pytest.raises(InvalidInput, match="one name"):
        load_serve_config(path, SERVE, {})


def test_what_all_replicas_claim(tmp_path):
    pools = (
        {"name": "a", "engine": {}, "num_cpus": 0.5, "num_replicas": 3, "resources": {"NPU": 1}},
        {"name": "b", "engine": {}, "num_cpus": 2, "num_gpus": 0.5, "autoscaling": {"max_replicas": 4}},
    )
    config = load_serve_config(write(tmp_path, *pools), SERVE, {})
    assert claim_of(config.pools) == Claim(cpus=1 + 10, gpus=2, resources={"NPU": 3})


@pytest.mark.parametrize("asks", [{"label_selector": {"pool": "npu"}}, {"accelerator_type": "H200"}])
def test_a_pool_that_needs_a_labelled_node(tmp_path, asks):
    config = load_serve_config(write(tmp_path, {"name": "a", "engine": {}, **asks}), SERVE, {})
    with pytest.raises(InvalidInput, match="pool 'a' asks for a node"):
        claim_of(config.pools)


class TestDeployment:
    def test_options_reach_serve(self):
        pool = build_pool(
            {
                "name": "vision-npu",
                "engine": {"device": "npu"},
                "num_cpus": 0.5,
                "resources": {"NPU": 1},
                "label_selector": {"pool": "npu"},
                "num_replicas": 3,
                "max_ongoing_requests": 17,
                "max_queued_requests": 5,
                "health_period_s": 3,
                "health_forward_timeout_s": 4,
            }
        )._bound_deployment
        assert (pool.num_replicas, pool.max_ongoing_requests, pool.max_queued_requests) == (3, 17, 5)
        assert pool.ray_actor_options["resources"] == {"NPU": 1}
        assert (pool.ray_actor_options["num_cpus"], pool.ray_actor_options["num_gpus"]) == (0.5, 0)
        assert pool.ray_actor_options["label_selector"] == {"pool": "npu"}
        config = pool._deployment_config
        # Serve's own limit has to leave the probe the time it is given.
        assert config.health_check_period_s == 3 and config.health_check_timeout_s > 4

    def test_autoscaling(self):
        pool = build_pool(
            {
                "name": "v",
                "engine": {},
                "autoscaling": {"min_replicas": 0, "max_replicas": 3, "target_ongoing_requests": 8},
            }
        )._bound_deployment
        scaling = pool._deployment_config.autoscaling_config
        assert (scaling.min_replicas, scaling.max_replicas, scaling.target_ongoing_requests) == (0, 3, 8)

    def test_an_unknown_key_is_one_readable_line(self):
        with pytest.raises(InvalidInput, match=r"^settings of pool 'v': engine\.modle: [^\n]*$"):
            build_pool({"name": "v", "engine": {"modle": "x"}})
