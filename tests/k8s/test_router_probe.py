"""The probe of components/router-tls against a server that speaks TLS, and one that asks for a client's certificate."""

import datetime
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from k8s.checks.render import K8S

PROBE = K8S / "components" / "router-tls" / "probe.py"
SERVICE = "encoder.v1.EncoderService"
DAY = datetime.timedelta(days=1)


def write_certificates(folder: Path, name: str) -> Path:
    """An authority's certificate and one that it signed for `name`, in the files of a Kubernetes secret."""
    now = datetime.datetime.now(datetime.UTC)

    def make(subject: str, issuer: str, key, signer, authority: bool) -> x509.Certificate:
        builder = (
            x509.CertificateBuilder()
            .subject_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, subject)]))
            .issuer_name(x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, issuer)]))
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - DAY)
            .not_valid_after(now + DAY)
            .add_extension(x509.BasicConstraints(ca=authority, path_length=None), critical=True)
            .add_extension(x509.SubjectAlternativeName([x509.DNSName(subject)]), critical=False)
        )
        return builder.sign(signer, hashes.SHA256())

    authority_key, key = ec.generate_private_key(ec.SECP256R1()), ec.generate_private_key(ec.SECP256R1())
    pem = serialization.Encoding.PEM
    folder.mkdir()
    (folder / "ca.crt").write_bytes(make("ca", "ca", authority_key, authority_key, True).public_bytes(pem))
    (folder / "tls.crt").write_bytes(make(name, "ca", key, authority_key, False).public_bytes(pem))
    (folder / "tls.key").write_bytes(
        key.private_bytes(pem, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return folder


@pytest.fixture(params=[False, True], ids=["tls", "mutual tls"])
def router(request, tmp_path):
    """(folder of the certificates, address, what its health says)."""
    folder = write_certificates(tmp_path / "tls", "vitfleet-router")
    credentials = grpc.ssl_server_credentials(
        [((folder / "tls.key").read_bytes(), (folder / "tls.crt").read_bytes())],
        (folder / "ca.crt").read_bytes() if request.param else None,
        require_client_auth=request.param,
    )
    board = health.HealthServicer()
    server = grpc.server(ThreadPoolExecutor(2))
    health_pb2_grpc.add_HealthServicer_to_server(board, server)
    port = server.add_secure_port("127.0.0.1:0", credentials)
    server.start()
    yield folder, f"127.0.0.1:{port}", board
    server.stop(None)


def probe(folder: Path, address: str) -> int:
    return subprocess.run([sys.executable, PROBE, folder, address], timeout=60, check=False).returncode


def test_it_passes_only_while_the_router_serves(router):
    folder, address, board = router
    board.set(SERVICE, health_pb2.HealthCheckResponse.NOT_SERVING)
    assert probe(folder, address) == 1
    board.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    assert probe(folder, address) == 0


def test_another_authority_is_not_believed(router, tmp_path):
    _, address, board = router
    board.set(SERVICE, health_pb2.HealthCheckResponse.SERVING)
    assert probe(write_certificates(tmp_path / "other", "vitfleet-router"), address) == 1
