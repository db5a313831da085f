"""Where the service is and how to reach it: address, TLS, token, channel options."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc

import encoder

Pem = bytes | str | os.PathLike[str]

DEFAULT_ADDRESS = "127.0.0.1:50051"
_WEB_ADDRESS = re.compile(r"https?://")
# A name or an IPv4 address alone; gRPC's own schemes, as dns: and unix:, have a colon.
_BARE_HOST = re.compile(r"[A-Za-z0-9._-]+")
_PRINTABLE = re.compile(r"[\x21-\x7e]+")


@dataclass(frozen=True)
class Connection:
    """All that opening a channel needs. Certificates and key are PEM: the bytes, or the path of a file."""

    address: str
    token: str | None = field(default=None, repr=False)
    tls: bool = False
    root_certificates: Pem | None = field(default=None, repr=False)
    client_certificate: Pem | None = field(default=None, repr=False)
    client_key: Pem | None = field(default=None, repr=False)
    server_name: str = ""
    max_message_bytes: int = 64 * 2**20
    keepalive: float = 60.0

    def __post_init__(self) -> None:
        check_address(self.address)
        if self.token is not None and not _PRINTABLE.fullmatch(self.token):
            raise ValueError("token is empty or holds spaces, line ends or non-ASCII characters: strip it first")
        if (self.client_certificate is None) != (self.client_key is None):
            raise ValueError("client_certificate and client_key go together: pass both or none")
        if self.keepalive <= 0:
            raise ValueError(f"keepalive is {self.keepalive}: pass seconds above 0")

    @property
    def secure(self) -> bool:
        """Whether TLS is on: asked for, or implied by a certificate."""
        return self.tls or self.root_certificates is not None or self.client_certificate is not None

    def credentials(self) -> grpc.ChannelCredentials:
        """TLS credentials; without root_certificates the ones that come with grpc are trusted."""
        return grpc.ssl_channel_credentials(
            root_certificates=_pem(self.root_certificates, "root_certificates"),
            private_key=_pem(self.client_key, "client_key"),
            certificate_chain=_pem(self.client_certificate, "client_certificate"),
        )

    def metadata(self) -> tuple[tuple[str, str], ...]:
        """Sent with every call."""
        return () if self.token is None else (("authorization", f"Bearer {self.token}"),)

    def channel_options(self) -> list[tuple[str, Any]]:
        options: list[tuple[str, Any]] = [
            ("grpc.max_send_message_length", self.max_message_bytes),
            ("grpc.max_receive_message_length", self.max_message_bytes),
            ("grpc.keepalive_time_ms", int(self.keepalive * 1000)),
            ("grpc.keepalive_timeout_ms", 20_000),
            # The client retries by itself; gRPC's own retries, or a config from DNS, would multiply with that.
            ("grpc.enable_retries", 0),
            ("grpc.service_config_disable_resolution", 1),
            # A name with several addresses (a headless Kubernetes service): use them all.
            ("grpc.service_config", '{"loadBalancingConfig": [{"round_robin": {}}]}'),
            # gRPC would wait 1 s and longer before it connects anew, and fail the retries in between unheard.
            ("grpc.initial_reconnect_backoff_ms", 100),
            ("grpc.min_reconnect_backoff_ms", 1000),
            ("grpc.max_reconnect_backoff_ms", 2000),
            ("grpc.primary_user_agent", f"vitfleet-python/{encoder.__version__}"),
        ]
        if self.server_name:
            options.append(("grpc.ssl_target_name_override", self.server_name))
        return options


def _pem(value: Pem | None, name: str) -> bytes | None:
    if value is None or isinstance(value, bytes):
        return value
    try:
        return Path(value).read_bytes()
    except OSError as error:
        raise ValueError(f"{name}: cannot read {os.fspath(value)}: {error.strerror or error}") from error


def check_address(address: str) -> None:
    """Raises ValueError for what gRPC would take for a name and look up in vain."""
    if not address or _WEB_ADDRESS.match(address):
        raise ValueError(f"address is {address!r}: pass host:port, such as {DEFAULT_ADDRESS}")
    if _BARE_HOST.fullmatch(address):
        raise ValueError(f"address is {address!r}, without a port: pass host:port, such as {address}:50051")
