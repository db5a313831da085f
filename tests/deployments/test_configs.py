"""The packaged Serve configs: what Serve makes of them, what the pools make of them, and that a pool can scale."""

from pathlib import Path

import pytest
import yaml
from ray._private.label_utils import validate_label_selector
from ray.serve.schema import ServeDeploySchema

from deployments.app import build_pool
from deployments.serve_config import POOL_BUILDER
from deployments.settings import DEPLOYMENT_NAME, SERVICER_FUNCTION, PoolSettings, parse_pool_settings

CONFIGS = Path(__file__).parents[2] / "deployments" / "configs"
POOLS = {
    "gpu": {"vision-gpu": "cuda", "text": "cpu"},
    "npu": {"vision-npu": "npu", "text": "cpu"},
    "mixed": {"vision-gpu": "cuda", "vision-npu": "npu", "vision-cpu": "cpu", "text": "cpu"},
}
each_config = pytest.mark.parametrize("name", POOLS)


def load(name: str) -> ServeDeploySchema:
    return ServeDeploySchema.model_validate(yaml.safe_load((CONFIGS / f"{name}.yaml").read_text()))


def pools_of(name: str) -> dict[str, PoolSettings]:
    return {pool.name: pool for pool in (parse_pool_settings(app.args) for app in load(name).applications)}


def test_there_is_no_other_config():
    assert {path.stem for path in CONFIGS.glob("*")} == {"local", *POOLS}


@each_config
def test_serve_takes_it(name):
    schema = load(name)
    # Kubernetes asks the proxy of every node whether it is ready, and from outside the pod's own loopback.
    assert (schema.proxy_location, schema.http_options.host) == ("EveryNode", "0.0.0.0")
    assert (schema.http_options.port, schema.grpc_options.port) == (8000, 9000)
    assert schema.grpc_options.grpc_servicer_functions == [SERVICER_FUNCTION]
    assert [app.name for app in schema.applications] == list(POOLS[name])
    assert {app.import_path for app in schema.applications} == {POOL_BUILDER}
    assert len({app.route_prefix for app in schema.applications}) == len(schema.applications)


@each_config
def test_pools_take_their_settings(name):
    for app in load(name).applications:
        pool = parse_pool_settings(app.args)
        assert pool.name == app.name
        assert pool.engine.device == POOLS[name][pool.name]
        assert pool.engine.tower == ("text" if pool.name == "text" else "vision")


@each_config
def test_a_replica_claims_the_device_it_computes_on(name):
    claims = {"cuda": (1, {}), "npu": (0, {"NPU": 1}), "cpu": (0, {})}
    kinds = {"cuda": "gpu", "npu": "npu", "cpu": "cpu"}
    for app in load(name).applications:
        options = build_pool(dict(app.args))._bound_deployment.ray_actor_options
        device = app.args["engine"]["device"]
        assert (options["num_gpus"], options.get("resources", {})) == claims[device]
        assert options["label_selector"] == {"vitfleet.io/device": kinds[device]}
        assert validate_label_selector(options["label_selector"]) is None
        # Threads of the forward and of decoding run at the same time.
        pool = parse_pool_settings(app.args)
        busy = (pool.engine.threads or 1) if device == "cpu" else 1
        assert busy <= pool.num_cpus and pool.decode_threads <= pool.num_cpus


@each_config
def test_a_pool_stays_warm_and_scales(name):
    for app in load(name).applications:
        built = build_pool(dict(app.args))._bound_deployment
        assert built.name == DEPLOYMENT_NAME
        scaling, slots = built._deployment_config.autoscaling_config, built.max_ongoing_requests
        assert 1 <= scaling.min_replicas < scaling.max_replicas
        batch = max(parse_pool_settings(app.args).engine.buckets)
        # Calls that wait for a slot are no load to Serve: a target at the slots would never scale up.
        assert batch <= scaling.target_ongoing_requests <= 2 * batch < slots
        assert scaling.target_ongoing_requests < slots


def test_one_pool_is_the_same_in_every_config():
    mixed = pools_of("mixed")
    for name in ("gpu", "npu"):
        for pool, settings in pools_of(name).items():
            assert settings == mixed[pool]
