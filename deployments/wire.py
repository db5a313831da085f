"""Between the wire contract (encoder.v1) and the encoder's own types. Pure functions; knows neither ray nor torch."""

import json
import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import code_pb2, error_details_pb2, status_pb2

from encoder.errors import EncoderError, InvalidInput
from encoder.features import FinishedFeatures
from encoder.outputs import FinishedVector, OutputDtype, OutputKind, OutputOptions
from encoder.v1 import encoder_pb2 as pb

if TYPE_CHECKING:
    from encoder.report import ModelInfo, Report

Overflow = Literal["truncate", "refuse"]
# What became of one item.
Answer = FinishedVector | FinishedFeatures | EncoderError

# How long the caller still waits, in milliseconds, as a decimal number. Ray Serve hands no deadline on to a replica, so
# whoever calls a pool sends it as metadata.
DEADLINE_METADATA = "x-encoder-timeout-ms"
# The standard place for a google.rpc.Status with details, in the trailing metadata of a failed call.
STATUS_DETAILS_METADATA = "grpc-status-details-bin"
# Trailers travel in one HTTP/2 header block of 8 KiB.
MAX_MESSAGE_CHARACTERS = 1024
INTERNAL_MESSAGE = "internal error: the log of the replica names its cause"

_DTYPES: dict[int, OutputDtype] = {
    pb.EMBEDDING_DTYPE_UNSPECIFIED: "float32",
    pb.EMBEDDING_DTYPE_FLOAT32: "float32",
    pb.EMBEDDING_DTYPE_FLOAT16: "float16",
    pb.EMBEDDING_DTYPE_INT8: "int8",
    pb.EMBEDDING_DTYPE_BINARY: "binary",
}
_DTYPE_TO_PROTO: dict[OutputDtype, pb.EmbeddingDtype] = {
    "float32": pb.EMBEDDING_DTYPE_FLOAT32,
    "float16": pb.EMBEDDING_DTYPE_FLOAT16,
    "int8": pb.EMBEDDING_DTYPE_INT8,
    "binary": pb.EMBEDDING_DTYPE_BINARY,
}
_KINDS: dict[int, OutputKind] = {
    pb.OUTPUT_KIND_UNSPECIFIED: "pooled",
    pb.OUTPUT_KIND_POOLED: "pooled",
    pb.OUTPUT_KIND_TOKENS: "tokens",
}
_OVERFLOWS: dict[int, Overflow] = {
    pb.TEXT_OVERFLOW_UNSPECIFIED: "truncate",
    pb.TEXT_OVERFLOW_TRUNCATE: "truncate",
    pb.TEXT_OVERFLOW_REFUSE: "refuse",
}
TOWERS = {"vision": pb.TOWER_VISION, "text": pb.TOWER_TEXT}


@dataclass(frozen=True)
class CallOptions:
    """What one request asks for; `model` and `pool` may be empty."""

    model: str
    pool: str
    output: OutputOptions
    overflow: Overflow


@dataclass(frozen=True)
class ReplicaIdentity:
    """Which replica this is: its pool, Serve's id of it, and where it runs."""

    pool: str
    replica: str
    node: str
    host: str
    pid: int


class CallFailure(NamedTuple):
    """A failed call as gRPC sends it; the trailing metadata is empty or carries the status with its details."""

    code: grpc.StatusCode
    details: str
    trailing_metadata: tuple[tuple[str, bytes], ...]


def options_from_proto(options: pb.EncodeOptions) -> CallOptions:
    """Raises InvalidInput for an enum value that this version does not know."""
    dtype = _DTYPES.get(options.dtype)
    if dtype is None:
        raise InvalidInput(f"embedding dtype {options.dtype} is unknown: use one of EmbeddingDtype")
    overflow = _OVERFLOWS.get(options.text_overflow)
    if overflow is None:
        raise InvalidInput(f"text overflow {options.text_overflow} is unknown: use one of TextOverflow")
    kind = _KINDS.get(options.output)
    if kind is None:
        raise InvalidInput(f"output kind {options.output} is unknown: use one of OutputKind")
    normalize = options.normalize if options.HasField("normalize") else kind == "pooled"
    output = OutputOptions(dtype, options.dimensions, normalize, kind)
    return CallOptions(options.model, options.pool, output, overflow)


def embedding_to_proto(vector: FinishedVector) -> pb.Embedding:
    return pb.Embedding(
        values=vector.values,
        dtype=_DTYPE_TO_PROTO[vector.dtype],
        dimensions=vector.dimensions,
        scale=vector.scale,
    )


def features_to_proto(features: FinishedFeatures) -> pb.Features:
    return pb.Features(
        values=features.values,
        dtype=_DTYPE_TO_PROTO[features.dtype],
        tokens=features.tokens,
        dimensions=features.dimensions,
        grid=features.grid,
    )


def outcome_fields(answer: Answer) -> dict[str, Any]:
    """The `outcome` of a result message: `embedding`, `features` or `error`."""
    if isinstance(answer, FinishedVector):
        return {"embedding": embedding_to_proto(answer)}
    if isinstance(answer, FinishedFeatures):
        return {"features": features_to_proto(answer)}
    return {"error": status_of(answer)}


def status_of(error: BaseException) -> status_pb2.Status:
    """The status an error is answered with: the project's own errors speak, others stay behind INTERNAL."""
    if isinstance(error, EncoderError):
        return status_pb2.Status(code=code_pb2.Code.Value(error.code), message=one_line(str(error)))
    return status_pb2.Status(code=code_pb2.INTERNAL, message=INTERNAL_MESSAGE)


def call_failure(error: BaseException, retry_after_s: float | None = None) -> CallFailure:
    """A whole call's failure, with google.rpc.RetryInfo when `retry_after_s` is given."""
    status = status_of(error)
    if retry_after_s is not None:
        delay = duration_pb2.Duration(nanos=0)
        delay.FromMilliseconds(max(1, round(retry_after_s * 1e3)))
        packed = any_pb2.Any()
        packed.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        status.details.append(packed)
    code = getattr(grpc.StatusCode, code_pb2.Code.Name(status.code))
    metadata = ((STATUS_DETAILS_METADATA, status.SerializeToString()),) if status.details else ()
    return CallFailure(code, status.message, metadata)


def retry_delay_s(metadata: Iterable[tuple[str, str | bytes]]) -> float | None:
    """The RetryInfo delay in a failed call's trailing metadata, in seconds; None when there is none."""
    for key, value in metadata:
        if key != STATUS_DETAILS_METADATA or isinstance(value, str):
            continue
        for detail in status_pb2.Status.FromString(value).details:
            info = error_details_pb2.RetryInfo()
            if detail.Unpack(info):
                return float(info.retry_delay.ToMilliseconds()) / 1e3
    return None


def timeout_s(metadata: Iterable[tuple[str, str | bytes]]) -> float | None:
    """What `DEADLINE_METADATA` says in seconds, None when it is not there; raises InvalidInput when it is no number."""
    for key, value in metadata:
        if key != DEADLINE_METADATA:
            continue
        text = value.decode("ascii", "replace") if isinstance(value, bytes) else value
        try:
            milliseconds = float(text)
        except ValueError:
            milliseconds = math.nan
        if not math.isfinite(milliseconds):
            raise InvalidInput(
                f"metadata {DEADLINE_METADATA}={text[:32]!r} is no number: send the remaining milliseconds"
            )
        return max(0.0, milliseconds / 1e3)
    return None


def one_line(message: str) -> str:
    """A message without line breaks, short enough for a trailer."""
    flat = " ".join(message.split())
    return flat if len(flat) <= MAX_MESSAGE_CHARACTERS else flat[: MAX_MESSAGE_CHARACTERS - 1] + "…"


def model_to_proto(info: "ModelInfo", pool: str) -> pb.Model:
    """The model as one pool serves it: one tower."""
    tower = pb.ServedTower(
        tower=TOWERS[info.tower],
        dimensions=info.dimensions,
        pools=[pool],
        fingerprint=info.fingerprint,
        preprocessing_json=json.dumps(info.preprocessing, sort_keys=True),
        mask_needs=info.mask_needs,
        max_tokens=info.max_tokens,
        compute_dtype=info.compute_dtype,
        logit_scale=info.logit_scale,
        output_kinds=[pb.OUTPUT_KIND_POOLED, *([pb.OUTPUT_KIND_TOKENS] if info.token_dimensions else [])],
        token_dimensions=info.token_dimensions,
        token_features=info.token_features,
    )
    return pb.Model(name=info.name, revision=info.revision, family=info.family, towers=[tower])


def report_to_proto(report: "Report", identity: ReplicaIdentity) -> pb.ReplicaReport:
    """A replica's report as it travels."""
    device, backend = report.device, report.backend
    return pb.ReplicaReport(
        pool=identity.pool,
        replica=identity.replica,
        node=identity.node,
        host=identity.host,
        pid=identity.pid,
        tower=TOWERS[report.model.tower],
        model=report.model.name,
        model_revision=report.model.revision,
        fingerprint=report.model.fingerprint,
        device=pb.DeviceReport(
            kind=device.kind,
            index=device.index,
            name=device.name,
            architecture=device.architecture,
            driver=device.driver,
            memory_bytes=device.memory_bytes,
            visible_count=device.visible_count,
            claimed_count=device.claimed_count,
        ),
        versions=dict(report.versions),
        backend=pb.BackendReport(
            name=backend.name,
            source=backend.source,
            reason=backend.reason,
            rejected=[pb.RejectedBackend(name=name, reason=reason) for name, reason in backend.rejected],
            mask_needs=sorted(str(need) for need in backend.capabilities.mask_needs),
            capturable=backend.capabilities.capturable,
            fallback=report.fallback,
            dtypes=sorted(backend.capabilities.dtypes),
        ),
        graphs=[
            pb.GraphReport(
                runner=graph.runner,
                bucket=str(graph.bucket),
                backend=graph.backend,
                dtype=graph.dtype,
                capture_ms=graph.capture_ms,
                memory_bytes=graph.memory_bytes,
                state=graph.state,
                reason=graph.reason,
                replay_ms=graph.replay_ms,
                eager_ms=graph.eager_ms,
                worst_cosine=graph.worst_cosine or 0.0,
                max_abs_error=graph.max_abs_error or 0.0,
            )
            for graph in report.graphs
        ],
        self_checks=[
            pb.SelfCheckReport(
                tower=TOWERS[check.tower],
                backend=check.backend,
                runner=check.runner,
                dtype=check.dtype,
                mask_need=check.mask_need,
                worst_cosine=check.worst_cosine,
                max_abs_error=check.max_abs_error,
                cosine_threshold=check.cosine_threshold,
                max_abs_threshold=check.max_abs_threshold,
                passed=check.passed,
                detail=check.detail,
            )
            for check in report.self_checks
        ],
        startup=[pb.StageReport(name=name, milliseconds=elapsed) for name, elapsed in report.startup],
        items_per_second=report.items_per_second,
        counters=dict(report.counters),
        compute_dtype=report.model.compute_dtype,
        notes=report.notes,
    )
