"""Nodes that come, go and are lost, on fake NPU nodes of one machine."""

import json
import os
import secrets
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest

from deployments.settings import ServeSettings, serve_environment

pytestmark = [pytest.mark.fleet, pytest.mark.timeout(1800)]
# Processes, mounts and network of its own, with loopback up; the end of `unshare` is the end of all of them.
NAMESPACES = ["unshare", "--pid", "--net", "--mount", "--fork", "--mount-proc", "--kill-child"]
LOOPBACK = (
    "import fcntl,os,socket,struct,sys;"
    "fcntl.ioctl(socket.socket(),0x8914,struct.pack('16sh14x',b'lo',0x41));"
    "os.execv(sys.executable,[sys.executable,'-m',sys.argv[1]])"
)


def allowed() -> bool:
    """Whether this user may make such namespaces."""
    if shutil.which("unshare") is None:
        return False
    return subprocess.run([*NAMESPACES, "true"], capture_output=True).returncode == 0


def run_apart(module: str) -> tuple[list[dict[str, Any]], int, str]:
    """Runs a module in such namespaces: the events it told, its exit status, and the end of what it complained of."""
    if not allowed():
        pytest.skip("namespaces of its own are not allowed here, and this test must not see other Rays")
    repository = Path(__file__).parents[2]
    # Ray's sockets need a short path.
    with tempfile.TemporaryDirectory(prefix="vn-") as folder:
        environment = {
            **{name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"},
            # Several nodes on one address share a port range in HAProxy mode.
            **serve_environment(ServeSettings(proxy="stock"), None, None),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
            "PYTHONPATH": str(repository),
            "RAY_TMPDIR": folder,
            "RAY_USAGE_STATS_ENABLED": "0",
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": secrets.token_hex(32),
        }
        done = subprocess.run(
            [*NAMESPACES, sys.executable, "-c", LOOPBACK, module],
            cwd=repository,
            env=environment,
            capture_output=True,
            text=True,
            timeout=1500,
        )
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    return events, done.returncode, done.stderr[-3000:]


def test_a_node_comes_under_load_and_goes_when_idle() -> None:
    events, status, complaint = run_apart("tests.fleet.nodes")
    assert [(event["event"], event["npu_nodes"]) for event in events] == [
        ("the head is up", 0),
        ("the first replica runs", 1),
        ("load brought a node", 2),
        ("idle gave it back", 1),
    ], complaint
    assert status == 0


def test_a_lost_node_is_not_noticed_and_a_new_one_takes_its_place() -> None:
    events, status, complaint = run_apart("tests.fleet.node_loss")
    assert events == [
        {"event": "a replica on each node"},
        {"event": "the node is lost"},
        {"event": "whole on a new node"},
        {"event": "the load", "wrong": 0, "errors": [], "right": True},
    ], complaint
    assert status == 0
