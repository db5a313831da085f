"""Settings of the router, validated at the edge; an unknown key is an error."""

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from encoder.errors import InvalidInput
from encoder.settings import TowerName, describe_validation

MIB = 1024 * 1024
Port = Annotated[int, Field(ge=0, le=65535)]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PoolTarget(_Settings):
    """One pool: a Serve application and the gRPC address that leads to it; several pools may share an address."""

    name: str = Field(pattern=r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$", description="name of the Serve application")
    address: str = Field(min_length=1, description="host:port, or any gRPC target such as dns:///pools:9000")
    towers: tuple[TowerName, ...] = Field(default=(), description="what it serves; empty: ask the pool")


class DeadlineSettings(_Settings):
    """How long calls may take, in seconds."""

    default_s: float = Field(
        default=30.0, gt=0, description="for a caller that names no deadline, and for each stream item"
    )
    margin_s: float = Field(default=0.02, ge=0, description="kept back from the caller's deadline, to answer in time")
    report_s: float = Field(
        default=5.0, gt=0, description="for one pool's part of ListModels, GetModel, GetBackendReport"
    )


class RetrySettings(_Settings):
    """When a failed call is tried again: it must be safe (encoding is), in time, and within the budget."""

    attempts: int = Field(default=3, ge=1, le=10, description="calls to pools for one request, the first included")
    backoff_s: float = Field(default=0.05, ge=0, description="longest pause before the first retry; doubles each time")
    backoff_max_s: float = Field(default=1.0, ge=0)
    budget_ratio: float = Field(default=0.2, ge=0, description="retries earned by each request")
    budget_burst: float = Field(default=20.0, ge=0, description="retries saved up at most")


class HealthSettings(_Settings):
    """Probes are real forwards; see health.py."""

    interval_s: float = Field(default=10.0, gt=0)
    timeout_s: float = Field(default=5.0, gt=0)
    failures: int = Field(default=2, ge=1, description="probes that fail in a row before the pool is down")
    recheck_s: float = Field(default=1.0, gt=0, description="pause between probes of a pool that is in doubt or down")
    traffic_counts: bool = Field(default=True, description="an embedding that was just served saves a probe")
    max_unprobed_s: float = Field(default=60.0, gt=0, description="probe at least so often, whatever the traffic")
    refresh_s: float = Field(
        default=30.0, gt=0, description="how often a pool is asked which models and towers it serves"
    )


class StreamSettings(_Settings):
    max_in_flight: int = Field(default=64, ge=1, description="items of one stream that are under way at once")


class DrainSettings(_Settings):
    """What happens on SIGTERM or SIGINT, in order."""

    notice_s: float = Field(
        default=1.0, ge=0, description="NOT_SERVING, but still taking calls: load balancers look away"
    )
    grace_s: float = Field(default=30.0, ge=0, description="then calls are refused, and those under way may end")


class ConnectionSettings(_Settings):
    """Transport: keepalive on both sides, age of client connections, connections to each pool."""

    keepalive_s: float = Field(default=60.0, gt=0, description="ping a silent connection that has calls under way")
    keepalive_timeout_s: float = Field(default=10.0, gt=0)
    min_client_ping_s: float = Field(default=10.0, gt=0, description="clients that ping more often are disconnected")
    max_age_s: float = Field(default=900.0, gt=0, description="then a client reconnects, and may reach another router")
    max_age_grace_s: float = Field(
        default=3600.0, gt=0, description="how long calls under way may go on after max_age_s"
    )
    per_pool: int = Field(default=2, ge=1, description="connections to each pool: one is bounded in concurrent calls")
    reconnect_max_s: float = Field(default=2.0, gt=0, description="longest pause between attempts to reach a lost pool")


class RouterSettings(_Settings):
    """All of the router's settings."""

    host: str = "127.0.0.1"
    port: Port = Field(default=50051, description="0 takes a free one")
    pools: tuple[PoolTarget, ...] = Field(min_length=1)
    default_model: str = Field(default="", description="model of a request that names none; empty: the only one served")
    max_message_bytes: int = Field(default=64 * MIB, ge=1024, description="of a request or a response, on both sides")
    reflection: bool = True
    metrics_host: str = "127.0.0.1"
    metrics_port: Port | None = Field(default=None, description="Prometheus over HTTP; empty: none")
    log_level: LogLevel = Field(default="WARNING", description="INFO adds the access log")
    deadline: DeadlineSettings = DeadlineSettings()
    retry: RetrySettings = RetrySettings()
    health: HealthSettings = HealthSettings()
    stream: StreamSettings = StreamSettings()
    drain: DrainSettings = DrainSettings()
    connection: ConnectionSettings = ConnectionSettings()

    @field_validator("pools")
    @classmethod
    def _names_differ(cls, pools: tuple[PoolTarget, ...]) -> tuple[PoolTarget, ...]:
        names = [pool.name for pool in pools]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise ValueError(f"pool names must differ, twice there: {', '.join(twice)}")
        return pools


def parse_settings(values: Mapping[str, Any], origin: str = "router settings") -> RouterSettings:
    """Raises InvalidInput with one line that names each wrong key."""
    try:
        return RouterSettings.model_validate(values)
    except ValidationError as error:
        raise InvalidInput(f"{origin}: {describe_validation(error)}") from None


def read_settings(text: str, origin: str) -> RouterSettings:
    """Settings from YAML or JSON text; `origin` names it in errors. Raises InvalidInput."""
    try:
        values = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise InvalidInput(f"{origin} is neither YAML nor JSON: {' '.join(str(error).split())}") from None
    if not isinstance(values, dict):
        raise InvalidInput(f"{origin} must be a mapping of settings, at least 'pools'")
    return parse_settings(values, origin)


def load_settings(path: Path) -> RouterSettings:
    """Settings from a YAML or JSON file; raises InvalidInput."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidInput(f"settings file {path} cannot be read: {error}") from None
    return read_settings(text, f"settings file {path}")
