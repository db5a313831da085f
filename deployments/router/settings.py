"""Settings of the router as a whole, validated at the edge; an unknown key is an error."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml
from pydantic import Field, ValidationError, field_validator, model_validator

from deployments.router.sections import (
    MIB,
    AgreementSettings,
    ConnectionSettings,
    DeadlineSettings,
    DiscoverySettings,
    DrainSettings,
    EjectionSettings,
    HealthSettings,
    HedgeSettings,
    LogLevel,
    MaskPolicy,
    PoolTarget,
    Port,
    RetrySettings,
    Section,
    StreamSettings,
    TlsSettings,
    TokenSettings,
)
from encoder.errors import InvalidInput
from encoder.settings import describe_validation


class RouterSettings(Section):
    """All of the router's settings."""

    host: str = Field(default="127.0.0.1", description="address to listen on")
    port: Port = Field(default=50051, description="0 takes a free one")
    tls: TlsSettings | None = Field(default=None, description="encryption towards clients; empty: plain text")
    tokens: TokenSettings | None = Field(default=None, description="who may call, and how much; empty: everybody")
    pools: tuple[PoolTarget, ...] = Field(default=(), description="the pools; may be empty with `discovery`")
    discovery: DiscoverySettings | None = Field(default=None, description="find pools by asking Serve; empty: do not")
    default_model: str = Field(default="", description="model of a request that names none; empty: the only one served")
    masks: MaskPolicy = Field(
        default="prefer",
        description="calls with a mask go to a pool whose backend takes it: if there is one (prefer), or never else",
    )
    max_message_bytes: int = Field(default=64 * MIB, ge=1024, description="of a request or a response, on both sides")
    reflection: bool = Field(default=True, description="serve gRPC reflection")
    metrics_host: str = Field(default="127.0.0.1", description="address the metrics are served on")
    metrics_port: Port | None = Field(default=None, description="Prometheus over HTTP; empty: none")
    log_level: LogLevel = Field(default="WARNING", description="of what the router tells on stderr")
    access_log: bool = Field(default=False, description="one line of JSON for each call, on stderr")
    deadline: DeadlineSettings = DeadlineSettings()
    retry: RetrySettings = RetrySettings()
    hedge: HedgeSettings = HedgeSettings()
    ejection: EjectionSettings = EjectionSettings()
    health: HealthSettings = HealthSettings()
    agreement: AgreementSettings = AgreementSettings()
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

    @model_validator(mode="after")
    def _has_pools(self) -> "RouterSettings":
        if not self.pools and self.discovery is None:
            raise ValueError("there is no pool: list some in 'pools', or name an address in 'discovery'")
        return self


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
