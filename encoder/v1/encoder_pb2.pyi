from google.rpc import status_pb2 as _status_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class EmbeddingDtype(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    EMBEDDING_DTYPE_UNSPECIFIED: _ClassVar[EmbeddingDtype]
    EMBEDDING_DTYPE_FLOAT32: _ClassVar[EmbeddingDtype]
    EMBEDDING_DTYPE_FLOAT16: _ClassVar[EmbeddingDtype]
    EMBEDDING_DTYPE_INT8: _ClassVar[EmbeddingDtype]
    EMBEDDING_DTYPE_BINARY: _ClassVar[EmbeddingDtype]

class TextOverflow(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TEXT_OVERFLOW_UNSPECIFIED: _ClassVar[TextOverflow]
    TEXT_OVERFLOW_TRUNCATE: _ClassVar[TextOverflow]
    TEXT_OVERFLOW_REFUSE: _ClassVar[TextOverflow]

class OutputKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTPUT_KIND_UNSPECIFIED: _ClassVar[OutputKind]
    OUTPUT_KIND_POOLED: _ClassVar[OutputKind]
    OUTPUT_KIND_TOKENS: _ClassVar[OutputKind]

class Tower(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    TOWER_UNSPECIFIED: _ClassVar[Tower]
    TOWER_VISION: _ClassVar[Tower]
    TOWER_TEXT: _ClassVar[Tower]
EMBEDDING_DTYPE_UNSPECIFIED: EmbeddingDtype
EMBEDDING_DTYPE_FLOAT32: EmbeddingDtype
EMBEDDING_DTYPE_FLOAT16: EmbeddingDtype
EMBEDDING_DTYPE_INT8: EmbeddingDtype
EMBEDDING_DTYPE_BINARY: EmbeddingDtype
TEXT_OVERFLOW_UNSPECIFIED: TextOverflow
TEXT_OVERFLOW_TRUNCATE: TextOverflow
TEXT_OVERFLOW_REFUSE: TextOverflow
OUTPUT_KIND_UNSPECIFIED: OutputKind
OUTPUT_KIND_POOLED: OutputKind
OUTPUT_KIND_TOKENS: OutputKind
TOWER_UNSPECIFIED: Tower
TOWER_VISION: Tower
TOWER_TEXT: Tower

class EncodeOptions(_message.Message):
    __slots__ = ("model", "dtype", "dimensions", "normalize", "pool", "text_overflow", "output")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    NORMALIZE_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    TEXT_OVERFLOW_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_FIELD_NUMBER: _ClassVar[int]
    model: str
    dtype: EmbeddingDtype
    dimensions: int
    normalize: bool
    pool: str
    text_overflow: TextOverflow
    output: OutputKind
    def __init__(self, model: _Optional[str] = ..., dtype: _Optional[_Union[EmbeddingDtype, str]] = ..., dimensions: _Optional[int] = ..., normalize: _Optional[bool] = ..., pool: _Optional[str] = ..., text_overflow: _Optional[_Union[TextOverflow, str]] = ..., output: _Optional[_Union[OutputKind, str]] = ...) -> None: ...

class RawPixels(_message.Message):
    __slots__ = ("data", "height", "width", "channels")
    DATA_FIELD_NUMBER: _ClassVar[int]
    HEIGHT_FIELD_NUMBER: _ClassVar[int]
    WIDTH_FIELD_NUMBER: _ClassVar[int]
    CHANNELS_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    height: int
    width: int
    channels: int
    def __init__(self, data: _Optional[bytes] = ..., height: _Optional[int] = ..., width: _Optional[int] = ..., channels: _Optional[int] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("encoded", "pixels")
    ENCODED_FIELD_NUMBER: _ClassVar[int]
    PIXELS_FIELD_NUMBER: _ClassVar[int]
    encoded: bytes
    pixels: RawPixels
    def __init__(self, encoded: _Optional[bytes] = ..., pixels: _Optional[_Union[RawPixels, _Mapping]] = ...) -> None: ...

class Embedding(_message.Message):
    __slots__ = ("values", "dtype", "dimensions", "scale")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    SCALE_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    dtype: EmbeddingDtype
    dimensions: int
    scale: float
    def __init__(self, values: _Optional[bytes] = ..., dtype: _Optional[_Union[EmbeddingDtype, str]] = ..., dimensions: _Optional[int] = ..., scale: _Optional[float] = ...) -> None: ...

class Features(_message.Message):
    __slots__ = ("values", "dtype", "tokens", "dimensions", "grid")
    VALUES_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    GRID_FIELD_NUMBER: _ClassVar[int]
    values: bytes
    dtype: EmbeddingDtype
    tokens: int
    dimensions: int
    grid: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, values: _Optional[bytes] = ..., dtype: _Optional[_Union[EmbeddingDtype, str]] = ..., tokens: _Optional[int] = ..., dimensions: _Optional[int] = ..., grid: _Optional[_Iterable[int]] = ...) -> None: ...

class Provenance(_message.Message):
    __slots__ = ("model", "model_revision", "fingerprint", "pool", "replica", "attention_backend", "runner", "fallback", "fallback_reason")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    ATTENTION_BACKEND_FIELD_NUMBER: _ClassVar[int]
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_REASON_FIELD_NUMBER: _ClassVar[int]
    model: str
    model_revision: str
    fingerprint: str
    pool: str
    replica: str
    attention_backend: str
    runner: str
    fallback: bool
    fallback_reason: str
    def __init__(self, model: _Optional[str] = ..., model_revision: _Optional[str] = ..., fingerprint: _Optional[str] = ..., pool: _Optional[str] = ..., replica: _Optional[str] = ..., attention_backend: _Optional[str] = ..., runner: _Optional[str] = ..., fallback: _Optional[bool] = ..., fallback_reason: _Optional[str] = ...) -> None: ...

class StageTimings(_message.Message):
    __slots__ = ("preprocess_ms", "queue_ms", "forward_ms", "finish_ms", "total_ms", "batch_size")
    PREPROCESS_MS_FIELD_NUMBER: _ClassVar[int]
    QUEUE_MS_FIELD_NUMBER: _ClassVar[int]
    FORWARD_MS_FIELD_NUMBER: _ClassVar[int]
    FINISH_MS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_MS_FIELD_NUMBER: _ClassVar[int]
    BATCH_SIZE_FIELD_NUMBER: _ClassVar[int]
    preprocess_ms: float
    queue_ms: float
    forward_ms: float
    finish_ms: float
    total_ms: float
    batch_size: int
    def __init__(self, preprocess_ms: _Optional[float] = ..., queue_ms: _Optional[float] = ..., forward_ms: _Optional[float] = ..., finish_ms: _Optional[float] = ..., total_ms: _Optional[float] = ..., batch_size: _Optional[int] = ...) -> None: ...

class ImageResult(_message.Message):
    __slots__ = ("embedding", "error", "features")
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    embedding: Embedding
    error: _status_pb2.Status
    features: Features
    def __init__(self, embedding: _Optional[_Union[Embedding, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., features: _Optional[_Union[Features, _Mapping]] = ...) -> None: ...

class TextResult(_message.Message):
    __slots__ = ("embedding", "error", "token_count", "truncated")
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    embedding: Embedding
    error: _status_pb2.Status
    token_count: int
    truncated: bool
    def __init__(self, embedding: _Optional[_Union[Embedding, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., token_count: _Optional[int] = ..., truncated: _Optional[bool] = ...) -> None: ...

class EncodeImagesRequest(_message.Message):
    __slots__ = ("options", "images")
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    options: EncodeOptions
    images: _containers.RepeatedCompositeFieldContainer[Image]
    def __init__(self, options: _Optional[_Union[EncodeOptions, _Mapping]] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ...) -> None: ...

class EncodeImagesResponse(_message.Message):
    __slots__ = ("results", "provenance", "timings")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ImageResult]
    provenance: Provenance
    timings: StageTimings
    def __init__(self, results: _Optional[_Iterable[_Union[ImageResult, _Mapping]]] = ..., provenance: _Optional[_Union[Provenance, _Mapping]] = ..., timings: _Optional[_Union[StageTimings, _Mapping]] = ...) -> None: ...

class EncodeTextRequest(_message.Message):
    __slots__ = ("options", "texts")
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    TEXTS_FIELD_NUMBER: _ClassVar[int]
    options: EncodeOptions
    texts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, options: _Optional[_Union[EncodeOptions, _Mapping]] = ..., texts: _Optional[_Iterable[str]] = ...) -> None: ...

class EncodeTextResponse(_message.Message):
    __slots__ = ("results", "provenance", "timings")
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[TextResult]
    provenance: Provenance
    timings: StageTimings
    def __init__(self, results: _Optional[_Iterable[_Union[TextResult, _Mapping]]] = ..., provenance: _Optional[_Union[Provenance, _Mapping]] = ..., timings: _Optional[_Union[StageTimings, _Mapping]] = ...) -> None: ...

class EncodeStreamRequest(_message.Message):
    __slots__ = ("id", "options", "image", "text")
    ID_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    IMAGE_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    id: str
    options: EncodeOptions
    image: Image
    text: str
    def __init__(self, id: _Optional[str] = ..., options: _Optional[_Union[EncodeOptions, _Mapping]] = ..., image: _Optional[_Union[Image, _Mapping]] = ..., text: _Optional[str] = ...) -> None: ...

class EncodeStreamResponse(_message.Message):
    __slots__ = ("id", "embedding", "error", "features", "provenance", "timings", "token_count", "truncated")
    ID_FIELD_NUMBER: _ClassVar[int]
    EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    FEATURES_FIELD_NUMBER: _ClassVar[int]
    PROVENANCE_FIELD_NUMBER: _ClassVar[int]
    TIMINGS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    id: str
    embedding: Embedding
    error: _status_pb2.Status
    features: Features
    provenance: Provenance
    timings: StageTimings
    token_count: int
    truncated: bool
    def __init__(self, id: _Optional[str] = ..., embedding: _Optional[_Union[Embedding, _Mapping]] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ..., features: _Optional[_Union[Features, _Mapping]] = ..., provenance: _Optional[_Union[Provenance, _Mapping]] = ..., timings: _Optional[_Union[StageTimings, _Mapping]] = ..., token_count: _Optional[int] = ..., truncated: _Optional[bool] = ...) -> None: ...

class ListModelsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListModelsResponse(_message.Message):
    __slots__ = ("models",)
    MODELS_FIELD_NUMBER: _ClassVar[int]
    models: _containers.RepeatedCompositeFieldContainer[Model]
    def __init__(self, models: _Optional[_Iterable[_Union[Model, _Mapping]]] = ...) -> None: ...

class GetModelRequest(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: str
    def __init__(self, model: _Optional[str] = ...) -> None: ...

class GetModelResponse(_message.Message):
    __slots__ = ("model",)
    MODEL_FIELD_NUMBER: _ClassVar[int]
    model: Model
    def __init__(self, model: _Optional[_Union[Model, _Mapping]] = ...) -> None: ...

class Model(_message.Message):
    __slots__ = ("name", "revision", "family", "towers")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    FAMILY_FIELD_NUMBER: _ClassVar[int]
    TOWERS_FIELD_NUMBER: _ClassVar[int]
    name: str
    revision: str
    family: str
    towers: _containers.RepeatedCompositeFieldContainer[ServedTower]
    def __init__(self, name: _Optional[str] = ..., revision: _Optional[str] = ..., family: _Optional[str] = ..., towers: _Optional[_Iterable[_Union[ServedTower, _Mapping]]] = ...) -> None: ...

class ServedTower(_message.Message):
    __slots__ = ("tower", "dimensions", "pools", "fingerprint", "preprocessing_json", "mask_needs", "max_tokens", "compute_dtype", "logit_scale", "output_kinds", "token_dimensions", "token_features")
    TOWER_FIELD_NUMBER: _ClassVar[int]
    DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    PREPROCESSING_JSON_FIELD_NUMBER: _ClassVar[int]
    MASK_NEEDS_FIELD_NUMBER: _ClassVar[int]
    MAX_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    LOGIT_SCALE_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_KINDS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_DIMENSIONS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_FEATURES_FIELD_NUMBER: _ClassVar[int]
    tower: Tower
    dimensions: int
    pools: _containers.RepeatedScalarFieldContainer[str]
    fingerprint: str
    preprocessing_json: str
    mask_needs: _containers.RepeatedScalarFieldContainer[str]
    max_tokens: int
    compute_dtype: str
    logit_scale: float
    output_kinds: _containers.RepeatedScalarFieldContainer[OutputKind]
    token_dimensions: int
    token_features: str
    def __init__(self, tower: _Optional[_Union[Tower, str]] = ..., dimensions: _Optional[int] = ..., pools: _Optional[_Iterable[str]] = ..., fingerprint: _Optional[str] = ..., preprocessing_json: _Optional[str] = ..., mask_needs: _Optional[_Iterable[str]] = ..., max_tokens: _Optional[int] = ..., compute_dtype: _Optional[str] = ..., logit_scale: _Optional[float] = ..., output_kinds: _Optional[_Iterable[_Union[OutputKind, str]]] = ..., token_dimensions: _Optional[int] = ..., token_features: _Optional[str] = ...) -> None: ...

class GetBackendReportRequest(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: str
    def __init__(self, pool: _Optional[str] = ...) -> None: ...

class GetBackendReportResponse(_message.Message):
    __slots__ = ("replicas", "unreachable", "pools", "agreement")
    REPLICAS_FIELD_NUMBER: _ClassVar[int]
    UNREACHABLE_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    AGREEMENT_FIELD_NUMBER: _ClassVar[int]
    replicas: _containers.RepeatedCompositeFieldContainer[ReplicaReport]
    unreachable: _containers.RepeatedCompositeFieldContainer[PoolError]
    pools: _containers.RepeatedCompositeFieldContainer[PoolStatus]
    agreement: _containers.RepeatedCompositeFieldContainer[Agreement]
    def __init__(self, replicas: _Optional[_Iterable[_Union[ReplicaReport, _Mapping]]] = ..., unreachable: _Optional[_Iterable[_Union[PoolError, _Mapping]]] = ..., pools: _Optional[_Iterable[_Union[PoolStatus, _Mapping]]] = ..., agreement: _Optional[_Iterable[_Union[Agreement, _Mapping]]] = ...) -> None: ...

class PoolError(_message.Message):
    __slots__ = ("pool", "error")
    POOL_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    pool: str
    error: _status_pb2.Status
    def __init__(self, pool: _Optional[str] = ..., error: _Optional[_Union[_status_pb2.Status, _Mapping]] = ...) -> None: ...

class PoolStatus(_message.Message):
    __slots__ = ("pool", "healthy", "quarantined", "reason", "in_flight", "items_per_second", "fingerprint", "model", "revision")
    POOL_FIELD_NUMBER: _ClassVar[int]
    HEALTHY_FIELD_NUMBER: _ClassVar[int]
    QUARANTINED_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    ITEMS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    REVISION_FIELD_NUMBER: _ClassVar[int]
    pool: str
    healthy: bool
    quarantined: bool
    reason: str
    in_flight: int
    items_per_second: float
    fingerprint: str
    model: str
    revision: str
    def __init__(self, pool: _Optional[str] = ..., healthy: _Optional[bool] = ..., quarantined: _Optional[bool] = ..., reason: _Optional[str] = ..., in_flight: _Optional[int] = ..., items_per_second: _Optional[float] = ..., fingerprint: _Optional[str] = ..., model: _Optional[str] = ..., revision: _Optional[str] = ...) -> None: ...

class Agreement(_message.Message):
    __slots__ = ("pool_a", "pool_b", "tower", "worst_cosine")
    POOL_A_FIELD_NUMBER: _ClassVar[int]
    POOL_B_FIELD_NUMBER: _ClassVar[int]
    TOWER_FIELD_NUMBER: _ClassVar[int]
    WORST_COSINE_FIELD_NUMBER: _ClassVar[int]
    pool_a: str
    pool_b: str
    tower: Tower
    worst_cosine: float
    def __init__(self, pool_a: _Optional[str] = ..., pool_b: _Optional[str] = ..., tower: _Optional[_Union[Tower, str]] = ..., worst_cosine: _Optional[float] = ...) -> None: ...

class ReplicaReport(_message.Message):
    __slots__ = ("pool", "replica", "node", "host", "pid", "tower", "model", "model_revision", "fingerprint", "device", "versions", "backend", "graphs", "self_checks", "startup", "items_per_second", "counters", "compute_dtype", "notes")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    class CountersEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    POOL_FIELD_NUMBER: _ClassVar[int]
    REPLICA_FIELD_NUMBER: _ClassVar[int]
    NODE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    TOWER_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    MODEL_REVISION_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    GRAPHS_FIELD_NUMBER: _ClassVar[int]
    SELF_CHECKS_FIELD_NUMBER: _ClassVar[int]
    STARTUP_FIELD_NUMBER: _ClassVar[int]
    ITEMS_PER_SECOND_FIELD_NUMBER: _ClassVar[int]
    COUNTERS_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_DTYPE_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    pool: str
    replica: str
    node: str
    host: str
    pid: int
    tower: Tower
    model: str
    model_revision: str
    fingerprint: str
    device: DeviceReport
    versions: _containers.ScalarMap[str, str]
    backend: BackendReport
    graphs: _containers.RepeatedCompositeFieldContainer[GraphReport]
    self_checks: _containers.RepeatedCompositeFieldContainer[SelfCheckReport]
    startup: _containers.RepeatedCompositeFieldContainer[StageReport]
    items_per_second: float
    counters: _containers.ScalarMap[str, int]
    compute_dtype: str
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, pool: _Optional[str] = ..., replica: _Optional[str] = ..., node: _Optional[str] = ..., host: _Optional[str] = ..., pid: _Optional[int] = ..., tower: _Optional[_Union[Tower, str]] = ..., model: _Optional[str] = ..., model_revision: _Optional[str] = ..., fingerprint: _Optional[str] = ..., device: _Optional[_Union[DeviceReport, _Mapping]] = ..., versions: _Optional[_Mapping[str, str]] = ..., backend: _Optional[_Union[BackendReport, _Mapping]] = ..., graphs: _Optional[_Iterable[_Union[GraphReport, _Mapping]]] = ..., self_checks: _Optional[_Iterable[_Union[SelfCheckReport, _Mapping]]] = ..., startup: _Optional[_Iterable[_Union[StageReport, _Mapping]]] = ..., items_per_second: _Optional[float] = ..., counters: _Optional[_Mapping[str, int]] = ..., compute_dtype: _Optional[str] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class DeviceReport(_message.Message):
    __slots__ = ("kind", "index", "name", "architecture", "driver", "memory_bytes", "visible_count", "claimed_count")
    KIND_FIELD_NUMBER: _ClassVar[int]
    INDEX_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    ARCHITECTURE_FIELD_NUMBER: _ClassVar[int]
    DRIVER_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    VISIBLE_COUNT_FIELD_NUMBER: _ClassVar[int]
    CLAIMED_COUNT_FIELD_NUMBER: _ClassVar[int]
    kind: str
    index: int
    name: str
    architecture: str
    driver: str
    memory_bytes: int
    visible_count: int
    claimed_count: int
    def __init__(self, kind: _Optional[str] = ..., index: _Optional[int] = ..., name: _Optional[str] = ..., architecture: _Optional[str] = ..., driver: _Optional[str] = ..., memory_bytes: _Optional[int] = ..., visible_count: _Optional[int] = ..., claimed_count: _Optional[int] = ...) -> None: ...

class BackendReport(_message.Message):
    __slots__ = ("name", "source", "reason", "rejected", "mask_needs", "capturable", "fallback", "dtypes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REJECTED_FIELD_NUMBER: _ClassVar[int]
    MASK_NEEDS_FIELD_NUMBER: _ClassVar[int]
    CAPTURABLE_FIELD_NUMBER: _ClassVar[int]
    FALLBACK_FIELD_NUMBER: _ClassVar[int]
    DTYPES_FIELD_NUMBER: _ClassVar[int]
    name: str
    source: str
    reason: str
    rejected: _containers.RepeatedCompositeFieldContainer[RejectedBackend]
    mask_needs: _containers.RepeatedScalarFieldContainer[str]
    capturable: bool
    fallback: str
    dtypes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, name: _Optional[str] = ..., source: _Optional[str] = ..., reason: _Optional[str] = ..., rejected: _Optional[_Iterable[_Union[RejectedBackend, _Mapping]]] = ..., mask_needs: _Optional[_Iterable[str]] = ..., capturable: _Optional[bool] = ..., fallback: _Optional[str] = ..., dtypes: _Optional[_Iterable[str]] = ...) -> None: ...

class RejectedBackend(_message.Message):
    __slots__ = ("name", "reason")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class GraphReport(_message.Message):
    __slots__ = ("runner", "bucket", "backend", "dtype", "capture_ms", "memory_bytes", "state", "reason", "replay_ms", "eager_ms", "worst_cosine", "max_abs_error")
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    BUCKET_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    CAPTURE_MS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    REPLAY_MS_FIELD_NUMBER: _ClassVar[int]
    EAGER_MS_FIELD_NUMBER: _ClassVar[int]
    WORST_COSINE_FIELD_NUMBER: _ClassVar[int]
    MAX_ABS_ERROR_FIELD_NUMBER: _ClassVar[int]
    runner: str
    bucket: str
    backend: str
    dtype: str
    capture_ms: float
    memory_bytes: int
    state: str
    reason: str
    replay_ms: float
    eager_ms: float
    worst_cosine: float
    max_abs_error: float
    def __init__(self, runner: _Optional[str] = ..., bucket: _Optional[str] = ..., backend: _Optional[str] = ..., dtype: _Optional[str] = ..., capture_ms: _Optional[float] = ..., memory_bytes: _Optional[int] = ..., state: _Optional[str] = ..., reason: _Optional[str] = ..., replay_ms: _Optional[float] = ..., eager_ms: _Optional[float] = ..., worst_cosine: _Optional[float] = ..., max_abs_error: _Optional[float] = ...) -> None: ...

class SelfCheckReport(_message.Message):
    __slots__ = ("tower", "backend", "runner", "dtype", "mask_need", "worst_cosine", "max_abs_error", "cosine_threshold", "max_abs_threshold", "passed", "detail")
    TOWER_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    MASK_NEED_FIELD_NUMBER: _ClassVar[int]
    WORST_COSINE_FIELD_NUMBER: _ClassVar[int]
    MAX_ABS_ERROR_FIELD_NUMBER: _ClassVar[int]
    COSINE_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    MAX_ABS_THRESHOLD_FIELD_NUMBER: _ClassVar[int]
    PASSED_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    tower: Tower
    backend: str
    runner: str
    dtype: str
    mask_need: str
    worst_cosine: float
    max_abs_error: float
    cosine_threshold: float
    max_abs_threshold: float
    passed: bool
    detail: str
    def __init__(self, tower: _Optional[_Union[Tower, str]] = ..., backend: _Optional[str] = ..., runner: _Optional[str] = ..., dtype: _Optional[str] = ..., mask_need: _Optional[str] = ..., worst_cosine: _Optional[float] = ..., max_abs_error: _Optional[float] = ..., cosine_threshold: _Optional[float] = ..., max_abs_threshold: _Optional[float] = ..., passed: _Optional[bool] = ..., detail: _Optional[str] = ...) -> None: ...

class StageReport(_message.Message):
    __slots__ = ("name", "milliseconds")
    NAME_FIELD_NUMBER: _ClassVar[int]
    MILLISECONDS_FIELD_NUMBER: _ClassVar[int]
    name: str
    milliseconds: float
    def __init__(self, name: _Optional[str] = ..., milliseconds: _Optional[float] = ...) -> None: ...
