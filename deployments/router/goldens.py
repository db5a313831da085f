"""The golden inputs through one pool: which replica gives which vectors."""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import cast

import grpc
import numpy as np

from deployments.router.calls import APPLICATION_METADATA, TIMEOUT_METADATA, id_metadata, new_request_id
from deployments.router.failures import read_failure
from deployments.router.pools import ENCODE_METHODS, Pool
from deployments.router.probe import Answer
from deployments.router.sections import AgreementSettings
from deployments.router.survey import PoolUnfit, parse
from encoder.golden import golden_pictures, golden_texts
from encoder.settings import TowerName
from encoder.v1 import encoder_pb2 as pb

# Neither square nor a multiple of a patch: how a pool resizes and crops shows in its vectors.
HEIGHT, WIDTH = 66, 90
COUNT = 4
# Of a replica: a float32 vector for each golden input, None for an error, absent where it was not asked.
Vectors = Mapping[int, np.ndarray | None]


@dataclass
class GoldenAnswers:
    """What a pool's replicas answered."""

    fingerprints: set[str] = field(default_factory=set)
    by_replica: dict[str, dict[int, np.ndarray | None]] = field(default_factory=dict)

    def add(self, answer: Answer, numbers: Iterable[int]) -> None:
        """`numbers`: which golden inputs were asked for. Raises PoolUnfit when the answer is not one to each."""
        wanted = list(numbers)
        if len(answer.results) != len(wanted):
            raise PoolUnfit(f"it answered {len(wanted)} golden inputs with {len(answer.results)} results")
        if answer.provenance.fingerprint:
            self.fingerprints.add(answer.provenance.fingerprint)
        vectors = self.by_replica.setdefault(answer.provenance.replica, {})
        for number, result in zip(wanted, answer.results, strict=True):
            vectors[number] = _vector(cast(pb.ImageResult | pb.TextResult, result))

    def covers(self, replicas: Iterable[str]) -> bool:
        """Whether each of these replicas, and each that answered at all, gave all golden inputs."""
        wanted = {*replicas, *self.by_replica}
        return bool(wanted) and all(is_complete(self.by_replica.get(replica, {})) for replica in wanted)


def is_complete(vectors: Vectors) -> bool:
    """Whether a replica was asked for all golden inputs."""
    return len(vectors) == COUNT


async def encode_goldens(
    pool: Pool, tower: TowerName, model: str, replicas: Iterable[str], settings: AgreementSettings
) -> GoldenAnswers:
    """Asks until each of `replicas` has answered, or `max_calls` are spent: a pool chooses its replicas itself.

    Raises grpc.aio.AioRpcError when the pool cannot be asked, PoolUnfit when it refuses the golden inputs.
    """
    answers = GoldenAnswers()
    requests = list(_requests(tower, model, settings.items_per_call))
    for call in range(settings.max_calls):
        # Each pass begins one further on: replicas that answer by turns shall not get the same inputs again.
        numbers, request = requests[(call + call // len(requests)) % len(requests)]
        metadata = (
            (APPLICATION_METADATA, pool.name),
            (TIMEOUT_METADATA, f"{settings.timeout_s * 1e3:.0f}"),
            *id_metadata(f"golden-{new_request_id()}"),
        )
        try:
            # Not as `encode`: four inputs now and then would colour the measured speed.
            response = await pool.ask(ENCODE_METHODS[tower], request, settings.timeout_s, metadata)
        except grpc.aio.AioRpcError as error:
            if call >= len(requests):
                break  # each golden input was answered once; the rest may follow next time
            failure = read_failure(error, pool.name, pool.address)
            if error.code() in _TOO_MANY and not failure.retryable:
                said = failure.error.message
                raise PoolUnfit(f"it refused the golden inputs ({said}): lower agreement.items_per_call") from None
            raise
        answers.add(parse(_ANSWERS[tower], response), numbers)
        if call + 1 >= len(requests) and answers.covers(replicas):
            break
    return answers


# Too many items, or too large a message.
_TOO_MANY = (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.RESOURCE_EXHAUSTED)
_ANSWERS: Mapping[TowerName, type[Answer]] = {"vision": pb.EncodeImagesResponse, "text": pb.EncodeTextResponse}


def _requests(tower: TowerName, model: str, items_per_call: int) -> Iterator[tuple[range, bytes]]:
    """Which golden inputs, and the request with them."""
    options = pb.EncodeOptions(model=model)
    for first in range(0, COUNT, items_per_call):
        numbers = range(first, min(COUNT, first + items_per_call))
        request: pb.EncodeTextRequest | pb.EncodeImagesRequest
        if tower == "text":
            texts = golden_texts()
            request = pb.EncodeTextRequest(options=options, texts=[texts[number] for number in numbers])
        else:
            request = pb.EncodeImagesRequest(options=options, images=[_pictures()[number] for number in numbers])
        yield numbers, request.SerializeToString()


@cache
def _pictures() -> tuple[pb.Image, ...]:
    return tuple(
        pb.Image(pixels=pb.RawPixels(data=picture.transpose(1, 2, 0).tobytes(), height=HEIGHT, width=WIDTH, channels=3))
        for picture in golden_pictures(HEIGHT, WIDTH)
    )


def _vector(result: pb.ImageResult | pb.TextResult) -> np.ndarray | None:
    embedding = result.embedding
    if result.WhichOneof("outcome") != "embedding" or embedding.dtype != pb.EMBEDDING_DTYPE_FLOAT32:
        return None
    if len(embedding.values) != 4 * embedding.dimensions or not embedding.values:
        return None
    return np.frombuffer(embedding.values, dtype="<f4")
