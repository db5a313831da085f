"""Ray's autoscaler v2 with fake NPU nodes under one pool: run in namespaces of its own by `test_nodes.py`.

`AutoscalingCluster` runs `ray stop --force`, which ends every Ray that it sees: hence the namespaces. What happens is
told as JSON lines on standard output.
"""

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import grpc

from encoder.v1 import encoder_pb2 as pb
from encoder.v1 import encoder_pb2_grpc
from tests.fleet.machine import document, pool

POOL, GRPC_PORT, WAIT_S = "vision-npu", 9000, 400.0
# The name that Ray gives to the node type of a fake head.
HEAD = "ray.head.default"
SIDE, ITEMS, CALLERS = 64, 200, 4


def tell(**event: Any) -> None:
    print(json.dumps(event), flush=True)


def cluster_config(head: dict[str, Any], workers: dict[str, Any], **more: Any) -> dict[str, Any]:
    """As Ray's fake_multi_node/example.yaml, which its wheel lacks; autoscaler v2."""
    from ray.autoscaler._private.fake_multi_node.node_provider import FAKE_HEAD_NODE_ID

    commands = ("initialization", "setup", "head_setup", "worker_setup", "head_start_ray", "worker_start_ray")
    provider = {
        "type": "external",
        "module": "ray.autoscaler._private.fake_multi_node.node_provider.FakeMultiNodeProvider",
        "use_node_id_as_ip": True,
        "disable_node_updaters": True,
        "disable_launch_config_check": True,
        "launch_multiple": True,
        "head_node_id": FAKE_HEAD_NODE_ID,
    }
    return {
        "cluster_name": "fake",
        "max_workers": 4,
        "head_node_type": HEAD,
        "upscaling_speed": 1.0,
        "provider": provider,
        "available_node_types": {**workers, HEAD: {"resources": head, "node_config": {}, "max_workers": 0}},
        "auth": {},
        "docker": {},
        "file_mounts": {},
        "cluster_synced_files": [],
        "file_mounts_sync_continuously": False,
        "rsync_exclude": [],
        "rsync_filter": [],
        **{f"{name}_commands": [] for name in commands},
        **more,
    }


def start_cluster() -> Any:
    """A head without NPUs, and up to two fake nodes with one each."""
    from ray.cluster_utils import AutoscalingCluster

    class FakeNodes(AutoscalingCluster):
        def _generate_config(
            self, head_resources: dict[str, Any], worker_node_types: dict[str, Any], **more: Any
        ) -> dict[str, Any]:
            more.pop("autoscaler_v2", None)
            return cluster_config(head_resources, worker_node_types, **more)

    store = 80 * 1024 * 1024
    npu = {
        "resources": {"CPU": 1, "NPU": 1, "object_store_memory": store},
        "node_config": {},
        "min_workers": 0,
        "max_workers": 2,
    }
    cluster = FakeNodes(
        head_resources={"CPU": 2, "object_store_memory": store},
        worker_node_types={"npu": npu},
        autoscaler_v2=True,
        idle_timeout_minutes=0.1,
    )
    cluster.start(override_env=dict(os.environ))
    return cluster


def npu_nodes() -> int:
    import ray

    return sum(node["Alive"] and "NPU" in node["Resources"] for node in ray.nodes())


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        if time.monotonic() > end:
            tell(event="failed", what=what, npu_nodes=npu_nodes())
            sys.exit(1)
        time.sleep(0.5)
    tell(event=what, npu_nodes=npu_nodes())


def send(stop: threading.Event) -> None:
    """One big call after the other: many pictures, few calls."""
    pixels = pb.RawPixels(data=bytes(SIDE * SIDE * 3), height=SIDE, width=SIDE, channels=3)
    request = pb.EncodeImagesRequest(images=[pb.Image(pixels=pixels)] * ITEMS)
    with grpc.insecure_channel(f"127.0.0.1:{GRPC_PORT}") as channel:
        stub = encoder_pb2_grpc.EncoderServiceStub(channel)
        while not stop.is_set():
            try:
                stub.EncodeImages(request, timeout=120, metadata=(("application", POOL),))
            except grpc.RpcError:
                stop.wait(0.5)


def main() -> None:
    import ray
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    cluster = start_cluster()
    ray.init("auto", log_to_driver=False)
    tell(event="the head is up", npu_nodes=npu_nodes())
    autoscaling = {
        "min_replicas": 1, "max_replicas": 2, "target_ongoing_requests": 64, "target_queue_age_s": 0.2,
        "upscale_delay_s": 1.0, "downscale_delay_s": 3.0, "look_back_period_s": 3.0, "metrics_interval_s": 1.0,
    }  # fmt: skip
    args = pool(
        POOL, resources={"NPU": 1}, autoscaling=autoscaling, health_forward_timeout_s=60.0, max_waiting_items=2000
    )
    config = ServeDeploySchema.model_validate(document([args]))
    serve.start(
        proxy_location="HeadOnly",
        grpc_options={
            "port": GRPC_PORT,
            "grpc_servicer_functions": ["encoder.v1.encoder_pb2_grpc.add_EncoderServiceServicer_to_server"],
        },
    )
    client = _get_global_client()
    assert client is not None
    client.deploy_apps(config)
    until(lambda: _status() == "RUNNING", "the first replica runs")
    stop = threading.Event()
    callers = [threading.Thread(target=send, args=(stop,)) for _ in range(CALLERS)]
    for caller in callers:
        caller.start()
    until(lambda: npu_nodes() == 2, "load brought a node")
    stop.set()
    for caller in callers:
        caller.join()
    until(lambda: npu_nodes() == 1, "idle gave it back")
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


def _status() -> str:
    from ray import serve

    application = serve.status().applications.get(POOL)
    return application.status.value if application is not None else ""


if __name__ == "__main__":
    main()
