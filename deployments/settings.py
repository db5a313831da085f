"""Settings of the serving side, validated at the edge; an unknown key is an error.

`PoolSettings` is what a Serve config hands to `deployments.app:build_pool` as `args`. `ServeSettings` says how Ray
Serve itself is run; `serve_environment` turns it into the variables that every Ray process must have before it starts.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from encoder.errors import InvalidInput
from encoder.settings import EngineSettings, describe_validation

MIB = 1024 * 1024
LOCAL_CONFIG = Path(__file__).parent / "configs" / "local.yaml"
DEPLOYMENT_NAME = "encoder"
SERVICER_FUNCTION = "encoder.v1.encoder_pb2_grpc.add_EncoderServiceServicer_to_server"
# A request of exactly max_request_bytes must pass the transport, to be counted by the pool itself.
TRANSPORT_SLACK_BYTES = MIB

ProxyKind = Literal["haproxy", "stock"]
Port = Annotated[int, Field(ge=0, le=65535)]


class AutoscalingSettings(BaseModel):
    """Bounds of a pool that scales with its load.

    `target_ongoing_requests` is the load one replica should carry; about one to two of its batches is a good value.
    `target_queue_age_s`: the pool also grows while items wait longer than this for the device, in seconds, as they do
    when calls are big or pictures slow; without it the calls alone decide. See `deployments.scaling`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    min_replicas: int = Field(1, ge=0)
    max_replicas: int = Field(1, ge=1)
    initial_replicas: int | None = Field(None, ge=0)
    target_ongoing_requests: float = Field(32.0, gt=0)
    target_queue_age_s: float | None = Field(None, gt=0)
    upscale_delay_s: float = Field(10.0, ge=0)
    downscale_delay_s: float = Field(300.0, ge=0)
    look_back_period_s: float = Field(15.0, gt=0)
    metrics_interval_s: float = Field(5.0, gt=0)

    @model_validator(mode="after")
    def _bounds_rise(self) -> "AutoscalingSettings":
        if self.min_replicas > self.max_replicas:
            raise ValueError(f"min_replicas={self.min_replicas} is above max_replicas={self.max_replicas}")
        initial = self.initial_replicas
        if initial is not None and not self.min_replicas <= initial <= self.max_replicas:
            raise ValueError(f"initial_replicas={initial} is outside min_replicas..max_replicas")
        return self


class PoolSettings(BaseModel):
    """One pool: the replicas of one model's tower on one kind of device.

    The pool's name is the name of its Serve application; the router addresses it by that name.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$")
    engine: EngineSettings

    max_items_per_request: int = Field(512, ge=1, description="images or texts in one call")
    max_request_bytes: int = Field(64 * MIB, ge=1024, description="size of one request message")
    max_response_bytes: int = Field(64 * MIB, ge=8192, description="size of one answer, which patch features may reach")
    max_waiting_items: int = Field(1024, ge=1, description="items admitted and not yet answered, in one replica")
    max_waiting_bytes: int = Field(512 * MIB, ge=1024, description="bytes of the requests these items came in")
    max_stream_items: int = Field(64, ge=1, description="items of one stream that are under way at once")
    decode_threads: int = Field(2, ge=1, le=256, description="pictures decoded at once; decode workers at most")

    health_period_s: float = Field(10.0, gt=0)
    health_forward_timeout_s: float = Field(30.0, gt=0, description="a forward that takes longer is a stall")
    drain_timeout_s: float = Field(20.0, ge=0)

    num_cpus: float = Field(1.0, ge=0)
    num_gpus: float = Field(0.0, ge=0)
    resources: dict[str, Annotated[float, Field(gt=0)]] = {}
    accelerator_type: str | None = None
    label_selector: dict[str, str] = {}

    num_replicas: int | None = Field(None, ge=1, description="fixed size; 1 when autoscaling is not given either")
    autoscaling: AutoscalingSettings | None = None
    max_ongoing_requests: int = Field(256, ge=1, description="calls one replica works on at once")
    max_queued_requests: int = Field(256, ge=-1, description="calls that wait for a slot; -1 is no bound")

    @property
    def engine_on_its_cpus(self) -> EngineSettings:
        """The engine's settings with as many threads as the claim has CPUs: replicas of a node share its cores."""
        if self.engine.threads is not None:
            return self.engine
        return self.engine.model_copy(update={"threads": max(1, int(self.num_cpus))})

    @model_validator(mode="after")
    def _fits_together(self) -> "PoolSettings":
        if self.max_items_per_request > self.max_waiting_items:
            raise ValueError(
                f"max_items_per_request={self.max_items_per_request} is above max_waiting_items="
                f"{self.max_waiting_items}: such a request could never be admitted"
            )
        if self.max_request_bytes > self.max_waiting_bytes:
            raise ValueError(
                f"max_request_bytes={self.max_request_bytes} is above max_waiting_bytes={self.max_waiting_bytes}: "
                "such a request could never be admitted"
            )
        threads = self.engine_on_its_cpus.threads
        if threads is not None and self.engine.lanes > threads:
            raise ValueError(
                f"engine.lanes={self.engine.lanes} is above the {threads} threads they share, which are "
                f"{'num_cpus' if self.engine.threads is None else 'engine.threads'}: use fewer lanes, or more threads"
            )
        if self.autoscaling is None:
            return self
        if self.num_replicas is not None:
            raise ValueError("num_replicas and autoscaling exclude each other: give one")
        # Calls that wait for a slot are not counted as load, so a target at or above the slots never scales up.
        target = self.autoscaling.target_ongoing_requests
        if target >= self.max_ongoing_requests:
            raise ValueError(
                f"autoscaling.target_ongoing_requests={target:g} must be below max_ongoing_requests="
                f"{self.max_ongoing_requests}, or the pool never scales up"
            )
        return self


class ServeSettings(BaseModel):
    """How Ray Serve is run on this machine.

    `haproxy` puts one HAProxy on the node in front of the replicas' own gRPC ports; `stock` is Serve's Python proxy.
    A port of 0 means: take a free one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    proxy: ProxyKind = "haproxy"
    host: str = "127.0.0.1"
    grpc_port: Port = 9000
    http_port: Port = 8000
    max_message_bytes: int = Field(64 * MIB, ge=MIB, le=1024 * MIB)
    haproxy_threads: int = Field(1, ge=1)
    haproxy_window_bytes: int = Field(4 * MIB, ge=65535, le=2**31 - 1)
    haproxy_buffer_bytes: int = Field(65536, ge=16384, le=2**24 - 1)
    drain_period_s: float = Field(30.0, ge=0, description="a leaving replica stays reachable for so long")


class LocalSettings(BaseModel):
    """A whole fleet on this machine: Ray, Serve with the pools of `config`, and the router in front."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: Path = Field(LOCAL_CONFIG, description="a Serve config; its ports, host and proxy come from `serve`")
    serve: ServeSettings = ServeSettings(drain_period_s=1.0)
    engine: dict[str, Any] = Field({}, description="engine settings of every pool that override the config's")
    router: bool = True
    router_port: Port = 50051
    startup_timeout_s: float = Field(300.0, gt=0)
    object_store_bytes: int = Field(80 * MIB, ge=80 * MIB, description="image bytes never pass through it")


class OwnPorts(BaseModel):
    """Ports of one machine that Serve's processes take for themselves in HAProxy mode; ranges are [first, last].

    `http` and `grpc` are the replicas'; the fallback proxy answers while an application has no replica.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    http: tuple[int, int]
    grpc: tuple[int, int]
    haproxy_metrics: int
    haproxy_stats: int
    fallback_http: int
    fallback_grpc: int


def serve_environment(settings: ServeSettings, ports: OwnPorts | None, folder: Path | None) -> dict[str, str]:
    """The variables that all Ray processes (head, workers, driver) need before they start.

    `ports` and `folder` keep several fleets on one machine apart; without them Serve's defaults hold.
    """
    limit = str(settings.max_message_bytes + TRANSPORT_SLACK_BYTES)
    environment = {
        # Serve's ingress takes 2 GiB by default, its proxy-to-replica leg 4 MiB: one limit for both.
        "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE": limit,
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": limit,
        # Handlers run on the replica's own loop: no thread hop, and a stream is read only as fast as it is served.
        "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
        "RAY_SERVE_LOG_TO_STDERR": "0",
        # By default 15: whatever else runs on the node, such as the router, takes the core from a forward, whose other
        # threads wait then. Measured on two cores, that cost a seventh of the rate and 3 ms of a lone picture's 23.
        "RAY_worker_niceness": "0",
        # By default 0.1 s: the controller and Ray's control store, which it asks each time, wake for nothing ten times
        # a second. Measured on two cores, that cost a lone picture 1 ms of its 22. A dead replica, found by its health
        # check, is replaced half a second later at most.
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "0.5",
        # By default a proxy that is not up after three times 5 s is killed and started again, which a slow machine may
        # never get through.
        "RAY_SERVE_PROXY_READY_CHECK_TIMEOUT_S": "60",
        "RAY_SERVE_PROXY_HEALTH_CHECK_TIMEOUT_S": "30",
    }
    if settings.proxy == "stock":
        return environment | {"RAY_SERVE_ENABLE_HA_PROXY": "0", "RAY_SERVE_ENABLE_DIRECT_INGRESS": "0"}
    environment |= {
        "RAY_SERVE_ENABLE_HA_PROXY": "1",
        "RAY_SERVE_HAPROXY_NBTHREAD": str(settings.haproxy_threads),
        # The default windows of 64 KiB are smaller than one picture.
        "RAY_SERVE_HAPROXY_H2_FE_INITIAL_WINDOW_SIZE": str(settings.haproxy_window_bytes),
        "RAY_SERVE_HAPROXY_H2_BE_INITIAL_WINDOW_SIZE": str(settings.haproxy_window_bytes),
        "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": str(settings.haproxy_buffer_bytes),
        "RAY_SERVE_HAPROXY_H2_MAX_FRAME_SIZE": str(settings.haproxy_buffer_bytes),
        "RAY_SERVE_DIRECT_INGRESS_MIN_DRAINING_PERIOD_S": f"{settings.drain_period_s:g}",
    }
    if ports is not None:
        environment |= {
            "RAY_SERVE_DIRECT_INGRESS_MIN_HTTP_PORT": str(ports.http[0]),
            "RAY_SERVE_DIRECT_INGRESS_MAX_HTTP_PORT": str(ports.http[1]),
            "RAY_SERVE_DIRECT_INGRESS_MIN_GRPC_PORT": str(ports.grpc[0]),
            "RAY_SERVE_DIRECT_INGRESS_MAX_GRPC_PORT": str(ports.grpc[1]),
            "RAY_SERVE_HAPROXY_METRICS_PORT": str(ports.haproxy_metrics),
            "RAY_SERVE_HAPROXY_STATS_PORT": str(ports.haproxy_stats),
            "RAY_SERVE_FALLBACK_PROXY_HTTP_PORT": str(ports.fallback_http),
            "RAY_SERVE_FALLBACK_PROXY_GRPC_PORT": str(ports.fallback_grpc),
        }
    if folder is not None:
        environment |= {
            "RAY_SERVE_HAPROXY_CONFIG_FILE_LOC": str(folder / "haproxy.cfg"),
            "RAY_SERVE_HAPROXY_SOCKET_PATH": str(folder / "admin.sock"),
            "RAY_SERVE_HAPROXY_METRICS_SOCKET_PATH": str(folder / "metrics.sock"),
            "RAY_SERVE_HAPROXY_SERVER_STATE_BASE": str(folder),
            "RAY_SERVE_HAPROXY_SERVER_STATE_FILE": str(folder / "server-state"),
        }
    return environment


def parse_pool_settings(values: dict[str, Any]) -> PoolSettings:
    """Settings from a Serve config's `args`; raises InvalidInput with one line that names each wrong key."""
    try:
        return PoolSettings.model_validate(values)
    except ValidationError as error:
        pool, known = values.get("name", "?"), (*PoolSettings.model_fields, *EngineSettings.model_fields)
        raise InvalidInput(f"settings of pool {pool!r}: {describe_validation(error, known)}") from None
