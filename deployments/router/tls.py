"""TLS on both sides: the server's certificate, read again when its files change, and channels to pools."""

import logging
import ssl
import threading
from collections.abc import Callable
from typing import cast

import grpc

from deployments.router.logs import log_event
from deployments.router.metrics import Metrics
from deployments.router.sections import PoolTls, TlsSettings
from deployments.router.watched import Signature, signature
from encoder.errors import InvalidInput

logger = logging.getLogger(__name__)
# What OpenSSL says, in words.
_SSL_REASONS = {
    "KEY_VALUES_MISMATCH": "key and certificate do not belong together",
    "NO_START_LINE": "a file holds no PEM",
    "NO_CERTIFICATE_OR_CRL_FOUND": "a file holds no PEM certificate",
}


class ServerCertificates:
    """Certificate, key and clients' CA as they are on disk; gRPC asks `changed` before every handshake.

    Files that do not fit together, as between two writes, are told once and not used: what was in force stays.
    """

    def __init__(self, settings: TlsSettings, metrics: Metrics) -> None:
        self._settings = settings
        self._metrics = metrics
        self._paths = [settings.certificate, settings.key, *([settings.client_ca] if settings.client_ca else [])]
        # gRPC may ask from any of its threads.
        self._lock = threading.Lock()
        self._seen: Signature = ()

    def credentials(self) -> grpc.ServerCredentials:
        """For `grpc.aio.Server.add_secure_port`. Raises InvalidInput when the files cannot be used."""
        self._seen = signature(self._paths)
        require_client = self._settings.client_ca is not None
        # None for no change is what gRPC documents, and its stubs forbid.
        changed = cast(Callable[[], grpc.ServerCertificateConfiguration], self.changed)
        return grpc.dynamic_ssl_server_credentials(self._read(), changed, require_client)

    def changed(self) -> grpc.ServerCertificateConfiguration | None:
        """The new configuration when the files have changed since they were read, and None otherwise; never raises."""
        with self._lock:
            now = signature(self._paths)
            if now == self._seen:
                return None
            self._seen = now
        try:
            configuration = self._read()
        except InvalidInput as error:
            self._metrics.reload("certificate", "refused")
            log_event(logger, logging.ERROR, "certificate_refused", {"reason": str(error), "kept": "the former one"})
            return None
        self._metrics.reload("certificate", "loaded")
        log_event(logger, logging.INFO, "certificate_loaded", {"certificate": str(self._settings.certificate)})
        return configuration

    def _read(self) -> grpc.ServerCertificateConfiguration:
        settings = self._settings
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            # gRPC would take any bytes, and fail every handshake later.
            context.load_cert_chain(settings.certificate, settings.key, password=_no_password)
            client_ca = None
            if settings.client_ca is not None:
                context.load_verify_locations(settings.client_ca)
                client_ca = settings.client_ca.read_bytes()
            pair = (settings.key.read_bytes(), settings.certificate.read_bytes())
        except (OSError, ValueError) as error:
            paths = ", ".join(str(path) for path in self._paths)
            raise InvalidInput(f"the TLS files cannot be used ({paths}): {_reason(error)}") from None
        return grpc.ssl_server_certificate_configuration([pair], client_ca)


def pool_credentials(settings: PoolTls) -> grpc.ChannelCredentials:
    """Raises InvalidInput when the CA file cannot be used."""
    if settings.ca is None:
        return grpc.ssl_channel_credentials()
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(settings.ca)
        return grpc.ssl_channel_credentials(settings.ca.read_bytes())
    except OSError as error:
        raise InvalidInput(f"the CA of a pool cannot be used ({settings.ca}): {_reason(error)}") from None


def _no_password() -> str:
    raise ValueError("the key is encrypted: give it without a password")


def _reason(error: Exception) -> str:
    if isinstance(error, ssl.SSLError):
        said = error.reason or str(error)
        return _SSL_REASONS.get(said, "a file holds no PEM of its kind" if "PEM lib" in said else said)
    return getattr(error, "strerror", None) or str(error) or type(error).__name__
