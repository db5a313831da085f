"""infinity's HTTP server, from the environment that `peer_setup` made for it, and its answers."""

import base64
import json
import os
import socket
import subprocess
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np

from benchmarks.peer_setup import PeerUnavailable, Recipe
from benchmarks.subjects import checkpoint

TIMEOUT_S = 180.0
# Name, options, seconds before a measurement: compiling happens at the first requests.
SETTINGS = (
    ("fp32, batch 32", ("--batch-size", "32"), 2.0),
    ("fp32, batch 8", ("--batch-size", "8"), 2.0),
    ("int8, batch 32", ("--batch-size", "32", "--dtype", "int8"), 2.0),
    ("fp32 compiled, batch 32", ("--batch-size", "32", "--compile"), 25.0),
)


@contextmanager
def serving(recipe: Recipe, arguments: Sequence[str]) -> Iterator[str]:
    """Its address; the server ends with the block."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(recipe.folder / "bin" / "infinity_emb"), "v2", "--model-id", str(checkpoint())]
    command += ["--served-model-name", "clip", "--engine", "torch", "--device", "cpu", "--no-bettertransformer"]
    command += ["--no-model-warmup", "--host", "127.0.0.1", "--port", str(port), "--log-level", "error", *arguments]
    own = {"HF_HUB_OFFLINE": "1", "DO_NOT_TRACK": "1", "INFINITY_ANONYMOUS_USAGE_STATS": "0", "PYTHONPATH": ""}
    with tempfile.TemporaryFile("w+") as log:
        server = subprocess.Popen(
            command, cwd=recipe.folder, stdout=log, stderr=log, env=os.environ | own, stdin=subprocess.DEVNULL
        )
        try:
            if not _answers(f"http://127.0.0.1:{port}/health", server):
                log.seek(0)
                last = (log.read().strip().splitlines() or ["it said nothing"])[-1]
                raise PeerUnavailable(f"its server did not start: {last[:200]}")
            yield f"127.0.0.1:{port}"
        finally:
            server.terminate()
            try:
                server.wait(15)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def http_vectors(address: str, pictures: Sequence[bytes]) -> np.ndarray:
    """Vectors of pictures by OpenAI's route."""
    given = [f"data:image/jpeg;base64,{base64.b64encode(data).decode()}" for data in pictures]
    body = json.dumps({"model": "clip", "input": given, "modality": "image"}).encode()
    request = urllib.request.Request(f"http://{address}/embeddings", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return np.array([row["embedding"] for row in json.load(answer)["data"]], dtype=np.float32)


def _answers(url: str, server: "subprocess.Popen[bytes]") -> bool:
    """Waits for the server's first answer; False when it ends, or takes longer than `TIMEOUT_S`."""
    until = time.monotonic() + TIMEOUT_S
    while time.monotonic() < until and server.poll() is None:
        try:
            with urllib.request.urlopen(url, timeout=2):
                return True
        except OSError:
            time.sleep(0.5)
    return False
