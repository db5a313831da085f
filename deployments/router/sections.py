"""The sections of the router's settings. An unknown key is an error; times are seconds."""

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from encoder.settings import TowerName

MIB = 1024 * 1024
POOL_NAME = r"^[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?$"
Port = Annotated[int, Field(ge=0, le=65535)]
LogLevel = Literal["DEBUG", "INFO", "WARNING", "ERROR"]
MaskPolicy = Literal["prefer", "require"]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class PoolTls(Section):
    """Encryption towards a pool. The files are read when the pool joins."""

    ca: Path | None = Field(default=None, description="PEM of who signs its certificate; empty: the roots gRPC brings")
    server_name: str = Field(default="", description="name in the pool's certificate, where it is not the address")


class PoolTarget(Section):
    """One pool: a Serve application and the gRPC address that leads to it; several pools may share an address."""

    name: str = Field(pattern=POOL_NAME, description="name of the Serve application")
    address: str = Field(min_length=1, description="host:port, or any gRPC target such as dns:///pools:9000")
    towers: tuple[TowerName, ...] = Field(default=(), description="what it serves; empty: ask the pool")
    tls: PoolTls | None = Field(default=None, description="encrypt; empty: plain text")


class DiscoverySettings(Section):
    """Pools found by asking Serve for its applications; those in `pools` stay as they are."""

    address: str = Field(min_length=1, description="gRPC target of Serve's proxy; the pools are asked there too")
    interval_s: float = Field(default=10.0, gt=0, description="pause between two questions")
    timeout_s: float = Field(default=5.0, gt=0, description="for one answer")
    gone_after: int = Field(default=2, ge=1, description="a pool leaves when so many answers in a row lack it")
    ignore: tuple[str, ...] = Field(default=(), description="applications that are no pools")
    tls: PoolTls | None = Field(default=None, description="encrypt; empty: plain text")


class TlsSettings(Section):
    """Encryption towards clients. When the files change, new connections get the new ones."""

    certificate: Path = Field(description="PEM of the certificate, and of those between it and its root")
    key: Path = Field(description="PEM of its private key")
    client_ca: Path | None = Field(
        default=None, description="PEM of who signs clients' certificates; then a client must show one"
    )


class TokenSettings(Section):
    """Bearer tokens. Without this section nobody is asked for one; health needs none."""

    file: Path = Field(description="YAML or JSON list of entries, see `python -m deployments.router.tokens make`")
    reload_s: float = Field(default=1.0, gt=0, description="how often the file is looked at")
    reflection_exempt: bool = Field(default=False, description="reflection needs no token")


class DeadlineSettings(Section):
    """How long calls may take."""

    default_s: float = Field(
        default=30.0, gt=0, description="for a caller that names no deadline, and for each stream item"
    )
    margin_s: float = Field(default=0.02, ge=0, description="kept back from the caller's deadline, to answer in time")
    report_s: float = Field(
        default=5.0, gt=0, description="for one pool's part of ListModels, GetModel, GetBackendReport"
    )


class RetrySettings(Section):
    """When a failed call is tried again: it must be safe (encoding is), in time, and within the budget."""

    attempts: int = Field(default=3, ge=1, le=10, description="calls to pools for one request, the first included")
    backoff_s: float = Field(default=0.05, ge=0, description="longest pause before the first retry; doubles each time")
    backoff_max_s: float = Field(default=1.0, ge=0, description="longest pause before any retry")
    budget_ratio: float = Field(default=0.2, ge=0, description="retries and hedges earned by each request")
    budget_burst: float = Field(default=20.0, ge=0, description="retries and hedges saved up at most")
    poison_s: float = Field(
        default=5.0,
        ge=0,
        description="a request that two replicas were lost under is refused for so long; doubles each time; 0: never",
    )


class HedgeSettings(Section):
    """A second call for a request whose first one is slow; whichever answers first counts. Needs to be asked for."""

    after_ms: float | None = Field(default=None, gt=0, description="hedge every request after so long; empty: none")
    by_metadata: bool = Field(default=True, description="a caller may ask for it with the metadata x-hedge-after-ms")
    least_ms: float = Field(default=5.0, ge=0, description="no caller gets it sooner")


class EjectionSettings(Section):
    """Pools that fail calls which their probes do not show are left out for a while."""

    consecutive_failures: int = Field(default=5, ge=1, description="failed calls in a row that eject a pool")
    error_rate: float = Field(default=0.5, gt=0, le=1, description="share of failed calls in a window that ejects it")
    min_calls: int = Field(default=20, ge=1, description="calls that a window needs before its share counts")
    window_s: float = Field(default=10.0, gt=0, description="length of the window")
    slow_s: float | None = Field(default=None, gt=0, description="a call that takes longer counts as failed; empty: no")
    base_s: float = Field(default=5.0, gt=0, description="how long the first ejection lasts; doubles each time")
    max_s: float = Field(default=300.0, gt=0, description="how long any ejection lasts at most")


class AgreementSettings(Section):
    """Golden inputs through every pool: those whose vectors do not belong to the fleet's are quarantined."""

    enabled: bool = Field(default=True, description="false: pools are not held against each other")
    cosine: float = Field(default=0.995, gt=0, le=1, description="least cosine to the reference's vectors")
    interval_s: float = Field(default=300.0, gt=0, description="how often a pool encodes the golden inputs")
    recheck_s: float = Field(
        default=10.0, gt=0, description="how often a pool in quarantine does, and one whose replicas change"
    )
    timeout_s: float = Field(default=30.0, gt=0, description="for one call with golden inputs")
    items_per_call: int = Field(default=4, ge=1, le=4, description="of the four golden inputs, how many in one call")
    max_calls: int = Field(default=16, ge=4, description="calls to reach all replicas of a pool, each time")
    settle_s: float = Field(default=2.0, ge=0, description="at the start, pools wait so long for each other's vectors")
    memory_s: float = Field(default=3600.0, gt=0, description="vectors of a pool that went down still count so long")


class HealthSettings(Section):
    """Probes are real forwards."""

    interval_s: float = Field(default=10.0, gt=0, description="pause between probes of a healthy pool")
    timeout_s: float = Field(default=5.0, gt=0, description="for one probe")
    failures: int = Field(default=2, ge=1, description="probes that fail in a row before the pool is down")
    recheck_s: float = Field(default=1.0, gt=0, description="pause between probes of a pool that is in doubt or down")
    traffic_counts: bool = Field(default=True, description="an embedding that was just served saves a probe")
    max_unprobed_s: float = Field(default=60.0, gt=0, description="probe at least so often, whatever the traffic")
    refresh_s: float = Field(
        default=30.0, gt=0, description="how often a pool is asked which models, towers and replicas it has"
    )


class StreamSettings(Section):
    """EncodeStream."""

    max_in_flight: int = Field(default=64, ge=1, description="items of one stream that are under way at once")


class DrainSettings(Section):
    """What happens on SIGTERM or SIGINT, in order."""

    notice_s: float = Field(
        default=1.0, ge=0, description="NOT_SERVING, but still taking calls: load balancers look away"
    )
    grace_s: float = Field(default=30.0, ge=0, description="then calls are refused, and those under way may end")


class ConnectionSettings(Section):
    """Transport: keepalive on both sides, age of client connections, connections to each pool."""

    keepalive_s: float = Field(default=60.0, gt=0, description="ping a silent connection that has calls under way")
    keepalive_timeout_s: float = Field(default=10.0, gt=0, description="then it is taken for dead")
    min_client_ping_s: float = Field(default=10.0, gt=0, description="clients that ping more often are disconnected")
    max_age_s: float = Field(default=900.0, gt=0, description="then a client reconnects, and may reach another router")
    max_age_grace_s: float = Field(
        default=3600.0, gt=0, description="how long calls under way may go on after max_age_s"
    )
    per_pool: int = Field(default=2, ge=1, description="connections to each pool: one is bounded in concurrent calls")
    reconnect_max_s: float = Field(default=2.0, gt=0, description="longest pause between attempts to reach a lost pool")
