"""A probe is a real forward: one small picture or text through the whole pool, and a look at the vector."""

import math
import struct

from deployments.router.calls import APPLICATION_METADATA, TIMEOUT_METADATA, id_metadata, new_request_id
from deployments.router.pools import Pool
from deployments.router.survey import PoolUnfit, parse
from encoder.settings import TowerName
from encoder.v1 import encoder_pb2 as pb

Answer = pb.EncodeImagesResponse | pb.EncodeTextResponse

SIDE = 64
PROBE_TEXT = "a red circle"


def probe_pixels() -> bytes:
    """A SIDE × SIDE RGB picture by formula: two gradients and a pattern, so that no channel is constant."""
    return bytes(
        level
        for row in range(SIDE)
        for column in range(SIDE)
        for level in (row * 255 // (SIDE - 1), column * 255 // (SIDE - 1), (row * 7 + column * 13) % 256)
    )


def _probe_request(tower: TowerName) -> bytes:
    if tower == "text":
        return pb.EncodeTextRequest(texts=[PROBE_TEXT]).SerializeToString()
    pixels = pb.RawPixels(data=probe_pixels(), height=SIDE, width=SIDE, channels=3)
    return pb.EncodeImagesRequest(images=[pb.Image(pixels=pixels)]).SerializeToString()


_REQUESTS: dict[TowerName, bytes] = {"vision": _probe_request("vision"), "text": _probe_request("text")}
_ANSWERS: dict[TowerName, type[Answer]] = {"vision": pb.EncodeImagesResponse, "text": pb.EncodeTextResponse}


async def probe(pool: Pool, tower: TowerName, timeout_s: float) -> None:
    """Returns when the pool has computed a sound vector in time.

    Raises grpc.aio.AioRpcError when the call fails, PoolUnfit when the vector is missing, of the wrong length, zero, or
    not finite.
    """
    metadata = (
        (APPLICATION_METADATA, pool.name),
        (TIMEOUT_METADATA, f"{timeout_s * 1e3:.0f}"),
        *id_metadata(f"probe-{new_request_id()}"),
    )
    answer = parse(_ANSWERS[tower], await pool.encode(tower, _REQUESTS[tower], 1, timeout_s, metadata))
    fault = vector_fault(answer, pool.dimensions.get(tower, 0))
    if fault:
        raise PoolUnfit(fault)


def vector_fault(answer: Answer, dimensions: int) -> str:
    """What is wrong with the answer to a probe; empty when nothing is. `dimensions` 0: any length will do."""
    if len(answer.results) != 1:
        return f"it answered 1 item with {len(answer.results)} results"
    result = answer.results[0]
    if result.WhichOneof("outcome") != "embedding":
        return f"it could not encode the probe: {result.error.message}"
    embedding = result.embedding
    if embedding.dtype != pb.EMBEDDING_DTYPE_FLOAT32:
        return f"it answered with dtype {embedding.dtype}, not float32"
    count = len(embedding.values) // 4
    expected = dimensions or embedding.dimensions
    if len(embedding.values) % 4 or not count or count != embedding.dimensions or count != expected:
        return f"its vector has {len(embedding.values)} bytes for {expected} float32 components"
    vector = struct.unpack(f"<{count}f", embedding.values)
    if not all(math.isfinite(value) for value in vector):
        return "its vector is not finite"
    if not any(vector):
        return "its vector is zero"
    return ""
