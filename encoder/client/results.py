"""What an encode call returns, and how a service's answer becomes arrays."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from encoder.client.errors import EncodeError, ItemError, one_line
from encoder.client.features import Features, features_fault, read_features
from encoder.client.formats import Dtype, VectorFormat
from encoder.client.retry import CODE_NAMES
from encoder.client.sources import Source
from encoder.v1 import encoder_pb2 as pb

# float32, float16, int8, or uint8 for packed bits.
VectorArray: TypeAlias = npt.NDArray[Any]
Result: TypeAlias = pb.ImageResult | pb.TextResult | pb.EncodeStreamResponse


@dataclass(frozen=True, eq=False)
class BatchInfo:
    """One request of an encode call that was answered.

    indices: int64 [b], places of its items in the caller's input. provenance, timings: as the service sent them.
    attempts: how often it was sent, 1 without a retry.
    """

    indices: npt.NDArray[np.int64]
    provenance: pb.Provenance
    timings: pb.StageTimings
    attempts: int


@dataclass(frozen=True, eq=False)
class EncodeResult:
    """All that came back for n items, in the caller's order.

    vectors: [n, D] float32, float16 or int8, or uint8 [n, ceil(D / 8)] for binary (dimension 0 is the highest bit of
        byte 0); the row of a failed item is NaN, or 0 for int8 and binary. D is 0 when no item got a vector and no
        dimensions were asked for.
    ok: bool [n]. errors: the failed items by index.
    dtype: as asked. dimensions: D.
    scales: float32 [n] for int8 (v is about q * scale), else None.
    token_counts: int64 [n], before truncation (0 where unknown); truncated: bool [n]; both None for images.
    batches: the requests that were answered, in the order of their first item.
    features: for output="tokens" the patch features of each item, None for a failed one, and `vectors` is [n, 0] with
        D the components of a patch; else empty.
    """

    vectors: VectorArray
    ok: npt.NDArray[np.bool_]
    errors: Mapping[int, ItemError]
    dtype: Dtype
    dimensions: int
    scales: npt.NDArray[np.float32] | None
    token_counts: npt.NDArray[np.int64] | None
    truncated: npt.NDArray[np.bool_] | None
    batches: tuple[BatchInfo, ...]
    features: tuple[Features | None, ...] = ()

    def __len__(self) -> int:
        return len(self.ok)

    @property
    def provenance(self) -> tuple[pb.Provenance, ...]:
        """One for each of `batches`."""
        return tuple(batch.provenance for batch in self.batches)

    @property
    def timings(self) -> tuple[pb.StageTimings, ...]:
        """One for each of `batches`."""
        return tuple(batch.timings for batch in self.batches)

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """The distinct fingerprints; more than one means that not all vectors belong together."""
        return tuple(dict.fromkeys(batch.provenance.fingerprint for batch in self.batches))

    def float32(self) -> npt.NDArray[np.float32]:
        """The vectors as float32 [n, D]: int8 times its scale; failed rows are NaN. ValueError for binary."""
        if self.dtype == "binary":
            raise ValueError("binary vectors hold signs alone: compare them by Hamming distance")
        values = self.vectors.astype(np.float32)
        if self.scales is not None:
            values *= self.scales[:, None]
        values[~self.ok] = np.nan
        return values

    def raise_for_errors(self) -> VectorArray:
        """The vectors, if every item has one; else raises EncodeError with this result inside."""
        if self.errors:
            raise EncodeError(self)
        return self.vectors

    def raise_or_features(self) -> list[Features]:
        """The patch features, if every item has some; else raises EncodeError with this result inside."""
        if self.errors:
            raise EncodeError(self)
        return [features for features in self.features if features is not None]


@dataclass(frozen=True, eq=False)
class TextColumns:
    """What only texts have: one row for each of the b items of a request."""

    token_counts: npt.NDArray[np.int64]
    truncated: npt.NDArray[np.bool_]

    @classmethod
    def of(cls, response: pb.EncodeTextResponse) -> TextColumns:
        return cls(
            np.array([result.token_count for result in response.results], dtype=np.int64),
            np.array([result.truncated for result in response.results], dtype=np.bool_),
        )


@dataclass(frozen=True, eq=False)
class Block:
    """One batch's share of an EncodeResult.

    indices: int64 [k], those of the k good rows; rows: [k, width]; scales: [k]. features: k instead of rows, where
    they were asked for.
    """

    errors: tuple[ItemError, ...]
    indices: npt.NDArray[np.int64]
    rows: VectorArray
    dimensions: int
    scales: npt.NDArray[np.float32]
    info: BatchInfo | None = None
    texts: TextColumns | None = None
    features: tuple[Features, ...] = ()


def block_without_answer(errors: tuple[ItemError, ...], form: VectorFormat) -> Block:
    """The block of a batch of which nothing could be sent."""
    nothing = np.empty(0, dtype=np.int64)
    return Block(errors, nothing, form.blank(0, 0), 0, np.empty(0, dtype=np.float32))


def decode_answer(
    sources: Sequence[Source],
    refused: tuple[ItemError, ...],
    response: pb.EncodeImagesResponse | pb.EncodeTextResponse,
    form: VectorFormat,
    options: pb.EncodeOptions,
    attempts: int,
) -> Block:
    """The block of an answered request.

    sources: the items of the request, as many as `response.results`. refused: items of the batch that were not sent.
    options: what was asked for; dimensions 0 takes what comes.
    """
    errors = list(refused)
    good: list[Source] = []
    embeddings: list[pb.Embedding] = []
    features: list[Features] = []
    dimensions = options.dimensions
    results: Iterable[pb.ImageResult | pb.TextResult] = response.results
    for source, result in zip(sources, results, strict=True):
        error = item_error(source.index, source.name, result, form, options.output, dimensions)
        if error is not None:
            errors.append(error)
            continue
        good.append(source)
        # The first good item sets the dimension: rows of one array are of one length.
        if isinstance(result, pb.ImageResult) and result.HasField("features"):
            dimensions = dimensions or result.features.dimensions
            features.append(read_features(result.features, form))
        else:
            dimensions = dimensions or result.embedding.dimensions
            embeddings.append(result.embedding)
    scales = [0.0] * len(features) if features else [embedding.scale for embedding in embeddings]
    packed = [embedding.values for embedding in embeddings]
    sent = np.array([source.index for source in sources], dtype=np.int64)
    return Block(
        errors=tuple(errors),
        indices=np.array([source.index for source in good], dtype=np.int64),
        rows=form.blank(len(good), 0) if features else form.rows(packed, dimensions if good else 0),
        dimensions=dimensions if good else 0,
        scales=np.array(scales, dtype=np.float32),
        info=BatchInfo(sent, response.provenance, response.timings, attempts),
        texts=TextColumns.of(response) if isinstance(response, pb.EncodeTextResponse) else None,
        features=tuple(features),
    )


def item_error(
    index: int,
    source: str,
    result: Result,
    form: VectorFormat,
    output: pb.OutputKind,
    dimensions: int,
) -> ItemError | None:
    """The error of one result: the service's own, or INTERNAL for an answer that breaks the contract."""
    outcome = result.WhichOneof("outcome")
    if outcome == "error":
        code = CODE_NAMES.get(result.error.code, "UNKNOWN")
        return ItemError(index, source, code, one_line(result.error.message))
    tokens = output == pb.OUTPUT_KIND_TOKENS
    fault = _features_fault(result, form, dimensions) if tokens else _vector_fault(result, form, dimensions)
    if fault:
        return ItemError(index, source, "INTERNAL", f"the service answered wrongly: {fault}")
    return None


def _vector_fault(result: Result, form: VectorFormat, dimensions: int) -> str:
    if result.WhichOneof("outcome") != "embedding":
        return "neither an embedding nor an error"
    fault = form.fault(result.embedding)
    if not fault and dimensions and result.embedding.dimensions != dimensions:
        return f"a vector of {result.embedding.dimensions} dimensions where {dimensions} are due"
    return fault


def _features_fault(result: Result, form: VectorFormat, dimensions: int) -> str:
    if isinstance(result, pb.TextResult) or result.WhichOneof("outcome") != "features":
        return "neither features nor an error"
    fault = features_fault(result.features, form)
    if not fault and dimensions and result.features.dimensions != dimensions:
        return f"features of {result.features.dimensions} dimensions where {dimensions} are due"
    return fault


@dataclass(frozen=True, eq=False)
class StreamResult:
    """What came of one item of a stream.

    id: the caller's, or the index as text. index: place of the item in the caller's input.
    vector: [D] float32, float16 or int8, or uint8 [ceil(D / 8)] for binary; None when `error` is set, or for
    output="tokens", where `features` holds the patch features and dimensions is F.
    scale: for int8, v is about q * scale. provenance, timings: as the service sent them; None when the item was not
    sent. token_count, truncated: for texts.
    """

    id: str
    index: int
    vector: VectorArray | None = None
    dimensions: int = 0
    scale: float = 0.0
    error: ItemError | None = None
    provenance: pb.Provenance | None = None
    timings: pb.StageTimings | None = None
    token_count: int = 0
    truncated: bool = False
    features: Features | None = None

    @property
    def ok(self) -> bool:
        return self.error is None
