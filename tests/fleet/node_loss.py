"""A node that is lost with its replica, under load: run in namespaces of its own by `test_nodes.py`.

Each node is a Ray node of its own (raylet, workers, resources) on this machine, behind Serve's stock proxy on the head.
What happens is told as JSON lines on standard output.
"""

import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from encoder.client import EncoderClient, ServiceError
from encoder.v1 import encoder_pb2 as pb
from tests.fleet.load import PATIENT, Load, Oracle
from tests.fleet.machine import document, pool

NPU, TEXT, GRPC_PORT, WAIT_S = "vision-npu", "text", 9000, 400.0
STORE_BYTES = 80 * 1024 * 1024
SIZES = {NPU: 2, TEXT: 1}


def tell(event: str, **more: Any) -> None:
    print(json.dumps({"event": event, **more}), flush=True)


def until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + WAIT_S
    while not condition():
        assert time.monotonic() < end, f"{what} within {WAIT_S:g} s"
        time.sleep(0.5)


def add_npu_node(cluster: Any) -> Any:
    """A node with room for one replica of the NPU pool."""
    return cluster.add_node(num_cpus=1, resources={"NPU": 1}, object_store_memory=STORE_BYTES)


@contextmanager
def router() -> Iterator[str]:
    """The address of a router before Serve's proxy."""
    towers = {NPU: "vision", TEXT: "text"}
    pools = [{"name": name, "address": f"127.0.0.1:{GRPC_PORT}", "towers": [tower]} for name, tower in towers.items()]
    command = [sys.executable, "-m", "deployments.router", "--settings", json.dumps({"port": 0, "pools": pools})]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        yield process.stdout.readline().strip().removeprefix("listening on ")
    finally:
        process.terminate()
        process.wait(30)


def report(address: str) -> list[pb.ReplicaReport]:
    """Of all replicas that answer."""
    with EncoderClient(address, timeout=30, retries=PATIENT) as client:
        try:
            return list(client.backend_report().replicas)
        except ServiceError:
            return []


def whole(address: str) -> bool:
    return Counter(replica.pool for replica in report(address)) == SIZES


def nodes_of(address: str) -> set[str]:
    """Ray's ids of the nodes that the NPU pool's replicas name."""
    return {replica.node for replica in report(address) if replica.pool == NPU}


def deploy() -> None:
    from ray import serve
    from ray.serve.context import _get_global_client
    from ray.serve.schema import ServeDeploySchema

    serve.start(
        proxy_location="HeadOnly",
        grpc_options={
            "port": GRPC_PORT,
            "grpc_servicer_functions": ["encoder.v1.encoder_pb2_grpc.add_EncoderServiceServicer_to_server"],
        },
    )
    pools = [
        pool(NPU, num_replicas=SIZES[NPU], resources={"NPU": 1}),
        # Where the head is: the text pool is to outlive the node.
        pool(TEXT, tower="text", num_replicas=SIZES[TEXT], resources={"HEAD": 1}),
    ]
    client = _get_global_client()
    assert client is not None
    client.deploy_apps(ServeDeploySchema.model_validate(document(pools)))


def main() -> None:
    import ray
    from ray import serve
    from ray.cluster_utils import Cluster

    oracle = Oracle.compute()
    cluster = Cluster(
        initialize_head=True,
        head_node_args={"num_cpus": 2, "resources": {"HEAD": 1}, "object_store_memory": STORE_BYTES},
    )
    nodes = {node.node_id: node for node in (add_npu_node(cluster), add_npu_node(cluster))}
    ray.init(address=cluster.address, log_to_driver=False)
    deploy()
    with router() as address:
        until(lambda: whole(address), "a whole fleet")
        assert nodes_of(address) == set(nodes)
        tell("a replica on each node")
        load = Load(address, oracle)
        with load.running() as tally:
            lost = sorted(nodes)[0]
            # All of its processes, at once and without notice.
            cluster.remove_node(nodes.pop(lost), allow_graceful=False)
            until(lambda: len(report(address)) == 2 and nodes_of(address) == set(nodes), "the node's replica is gone")
            tell("the node is lost")
            done = tally.right["images"]
            until(lambda: tally.right["images"] > done + 100, "the other node's replica serves on")
            added = add_npu_node(cluster)
            nodes[added.node_id] = added
            until(lambda: whole(address) and nodes_of(address) == set(nodes), "the fleet is whole on the new node")
            tell("whole on a new node")
        tell("the load", wrong=tally.wrong, errors=tally.errors, right=min(tally.right.values()) > 0)
    serve.shutdown()
    ray.shutdown()
    cluster.shutdown()


if __name__ == "__main__":
    main()
