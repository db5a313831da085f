"""Settings of the serving side: what holds, what is refused and how it is said, and the environment they lead to."""

import re
from importlib.util import find_spec
from pathlib import Path

import pytest

from deployments.settings import OwnPorts, ServeSettings, parse_pool_settings, serve_environment
from encoder.errors import InvalidInput

POOL = {"name": "vision-cpu", "engine": {}}


PORTS = OwnPorts(
    http=(20000, 20009), grpc=(20010, 20019),
    haproxy_metrics=20020, haproxy_stats=20021, fallback_http=20022, fallback_grpc=20023,
)  # fmt: skip


def parse(**changes: object):
    return parse_pool_settings({**POOL, **changes})


def test_defaults_hold_together():
    pool = parse()
    assert pool.max_items_per_request <= pool.max_waiting_items
    assert pool.max_request_bytes == 64 * 1024 * 1024 <= pool.max_waiting_bytes
    assert (pool.engine.model, pool.engine.tower, pool.engine.device) == ("demo", "vision", "cpu")


def test_settings_survive_the_way_into_a_replica():
    pool = parse(autoscaling={"min_replicas": 1, "max_replicas": 3}, resources={"NPU": 1}, engine={"buckets": [4, 1]})
    assert parse_pool_settings(pool.model_dump(mode="json")) == pool


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"max_batch": 3}, ["vision-cpu", "max_batch", "no such setting"]),
        ({"engine": {"modle": "x"}}, ["engine.modle", "no such setting, did you mean model?"]),
        ({"engine": {"quantisation": "int8"}}, ["engine.quantisation", "did you mean quantization?"]),
        ({"num_cpu": 2}, ["num_cpu: no such setting, did you mean num_cpus?"]),
        ({"engine": {"dtype": "float8"}}, ["engine.dtype", "'bfloat16' or 'float16', not 'float8'"]),
        ({"name": "Vision CPU"}, ["name", "pattern"]),
        ({"decode_threads": 0}, ["decode_threads", "greater than or equal to 1"]),
        ({"resources": {"NPU": 0}}, ["resources.NPU"]),
        ({"max_items_per_request": 2000}, ["max_items_per_request=2000", "max_waiting_items=1024"]),
        ({"max_request_bytes": 2**30}, ["max_request_bytes=1073741824", "max_waiting_bytes=536870912"]),
        ({"engine": {"lanes": 0}}, ["engine.lanes", "greater than 0"]),
        ({"engine": {"lanes": 2}}, ["engine.lanes=2 is above the 1 threads", "which are num_cpus: use fewer lanes"]),
        ({"engine": {"lanes": 3, "threads": 2}, "num_cpus": 8}, ["lanes=3", "the 2 threads", "are engine.threads"]),
        ({"num_replicas": 2, "autoscaling": {}}, ["num_replicas and autoscaling exclude"]),
        (
            {"autoscaling": {"target_ongoing_requests": 8}, "max_ongoing_requests": 8},
            ["target_ongoing_requests=8 must be below max_ongoing_requests=8", "never scales up"],
        ),
        ({"autoscaling": {"min_replicas": 3, "max_replicas": 2}}, ["autoscaling", "min_replicas=3"]),
        ({"autoscaling": {"initial_replicas": 2}}, ["initial_replicas=2"]),
    ],
)
def test_what_cannot_hold_is_refused_in_one_line(changes, words):
    with pytest.raises(InvalidInput) as refused:
        parse(**changes)
    assert "\n" not in str(refused.value)
    for word in words:
        assert word in str(refused.value)


def test_lanes_are_no_more_than_the_threads_they_share():
    assert parse(engine={"lanes": 2}, num_cpus=2).engine_on_its_cpus.lanes == 2
    assert parse(engine={"lanes": 4, "threads": 4}, num_cpus=1).engine.lanes == 4


def test_a_target_below_the_slots_is_taken():
    pool = parse(autoscaling={"target_ongoing_requests": 7.5}, max_ongoing_requests=8)
    assert pool.autoscaling is not None and pool.autoscaling.target_ongoing_requests == 7.5


def test_haproxy_environment():
    settings = ServeSettings(max_message_bytes=2**26, haproxy_window_bytes=2**20, drain_period_s=1.5)
    environment = serve_environment(settings, PORTS, Path("/run/fleet"))
    assert environment["RAY_SERVE_ENABLE_HA_PROXY"] == "1"
    # A request of exactly the limit, with what gRPC and protobuf put around it, has to reach the pool.
    for name in ("RAY_SERVE_GRPC_MAX_MESSAGE_SIZE", "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH"):
        assert int(environment[name]) > 2**26
    assert environment["RAY_SERVE_HAPROXY_H2_BE_INITIAL_WINDOW_SIZE"] == str(2**20)
    assert environment["RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S"] == "1.5"
    assert environment["RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT"] == "20019"
    assert environment["RAY_SERVE_HAPROXY_STATS_PORT"] == "20021"
    assert environment["RAY_SERVE_FALLBACK_PROXY_GRPC_PORT"] == "20023"
    assert environment["RAY_SERVE_HAPROXY_CONFIG_FILE_LOC"] == "/run/fleet/haproxy.cfg"


def test_stock_environment_turns_the_replicas_own_ports_off():
    environment = serve_environment(ServeSettings(proxy="stock"), None, None)
    # RAY_SERVE_THROUGHPUT_OPTIMIZED alone would open them.
    assert environment["RAY_SERVE_THROUGHPUT_OPTIMIZED"] == "1"
    assert environment["RAY_SERVE_ENABLE_DIRECT_INGRESS"] == environment["RAY_SERVE_ENABLE_HA_PROXY"] == "0"
    assert not [name for name in environment if "HAPROXY" in name]


def test_no_port_of_serves_own_is_left_to_its_default():
    """Against Ray's own source: two fleets on one machine must share none."""
    source = ray_source("serve/_private/constants.py")
    named = set(re.findall(r'"(RAY_SERVE_\w*(?:HAPROXY|INGRESS|FALLBACK)\w*_PORT)"', source))
    assert len(named) == 8
    assert named - set(serve_environment(ServeSettings(), PORTS, Path("/x"))) == set()


def test_every_variable_is_one_that_serve_reads():
    """Against Ray's own source: a misspelt variable would be ignored in silence."""
    source = ray_source("serve/_private/constants.py") + ray_source("_private/ray_constants.py")
    names = set(serve_environment(ServeSettings(), PORTS, Path("/x")))
    names |= set(serve_environment(ServeSettings(proxy="stock"), None, None))
    assert [name for name in sorted(names) if f'"{name}"' not in source] == []


def ray_source(file: str) -> str:
    ray = find_spec("ray")
    assert ray is not None and ray.origin is not None
    return (Path(ray.origin).parent / file).read_text()


@pytest.mark.parametrize(
    ("values", "threads"),
    [({}, 1), ({"num_cpus": 4}, 4), ({"num_cpus": 0.5}, 1), ({"num_cpus": 8, "engine": {"threads": 3}}, 3)],
)
def test_threads_are_the_claims(values: dict[str, object], threads: int) -> None:
    settings = parse_pool_settings({"name": "vision-cpu", "engine": {}, **values})
    assert settings.engine_on_its_cpus.threads == threads
