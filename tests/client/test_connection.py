"""Token, TLS, health, the calls that describe the service, and what importing the client costs."""

import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
import numpy as np
import pytest
from grpc_health.v1 import health_pb2

import encoder
from encoder.client import EncoderClient, ServiceError
from encoder.v1 import encoder_pb2 as pb
from tests.client.formula import expected_rows
from tests.client.service import Running, start
from tests.router.certificates import self_signed

Code = grpc.StatusCode


def test_token(connect, service):
    client = connect(token="s3cret")
    client.list_models()
    list(client.encode_stream([b"x"]))
    client.encode_images([b"x"])
    assert [call.metadata["authorization"] for call in service.seen] == ["Bearer s3cret"] * 3
    connect().list_models()
    assert "authorization" not in service.seen[-1].metadata


def test_the_token_is_not_shown():
    client = EncoderClient(token="s3cret")
    assert repr(client) == "EncoderClient('127.0.0.1:50051', model='')"
    assert "s3cret" not in repr(client._connection) and "s3cret" not in str(vars(client)["_connection"])


def test_user_agent(client, service):
    client.list_models()
    assert service.seen[0].metadata["user-agent"].startswith(f"vitfleet-python/{encoder.__version__} ")


def test_missing_and_wrong_token(connect, service):
    service.fail_next(Code.UNAUTHENTICATED, "no token", times=1)
    with pytest.raises(ServiceError, match="UNAUTHENTICATED: no token: pass token= to the client"):
        connect().encode_images([b"x"])
    service.fail_next(Code.UNAUTHENTICATED, "unknown token: ask the operator")
    with pytest.raises(ServiceError) as caught:
        connect(token="wrong").encode_images([b"x"])
    assert str(caught.value) == "UNAUTHENTICATED: unknown token: ask the operator"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"address": "http://127.0.0.1:50051"}, "pass host:port, such as 127.0.0.1:50051"),
        ({"address": ""}, "pass host:port"),
        ({"address": "127.0.0.1"}, "without a port: pass host:port, such as 127.0.0.1:50051"),
        ({"address": "router.fleet"}, "without a port: pass host:port, such as router.fleet:50051"),
        ({"token": "line\nend"}, "token is empty or holds spaces"),
        ({"token": ""}, "token is empty"),
        ({"timeout": 0}, "timeout is 0"),
        ({"batch_size": 0}, "batch_size is 0"),
        ({"concurrency": -1}, "concurrency is -1"),
        ({"keepalive": 0}, "keepalive is 0"),
        ({"max_message_bytes": 1000}, "max_message_bytes is 1000"),
        ({"client_key": b"key"}, "go together"),
        ({"retries": -1}, "retries is -1"),
    ],
)
def test_settings_that_cannot_be(settings, message):
    with pytest.raises(ValueError, match=message):
        EncoderClient(**settings)


def test_describing_calls(connect, service):
    client = connect()
    assert [model.name for model in client.list_models()] == ["demo", "other"]
    assert isinstance(client.list_models()[0], pb.Model)
    assert client.get_model().name == "demo"
    assert client.get_model("other").name == "other"
    assert connect(model="mine").get_model().name == "mine"
    assert client.backend_report().replicas[0].pool == "vision-cpu"
    assert client.backend_report("vision-npu").replicas[0].pool == "vision-npu"
    with pytest.raises(ServiceError) as caught:
        client.get_model("unknown")
    assert caught.value.code == "NOT_FOUND" and str(caught.value) == (
        "NOT_FOUND: no model 'unknown' here: 'demo' is served"
    )
    service.fail_next(Code.UNAVAILABLE, times=2)
    assert client.get_model().name == "demo"


def test_health(client, running):
    assert client.healthy() is True
    running.health.set("", health_pb2.HealthCheckResponse.NOT_SERVING)
    assert client.healthy() is False
    running.health.set("vision-cpu", health_pb2.HealthCheckResponse.SERVING)
    assert client.healthy("vision-cpu") is True
    with pytest.raises(ServiceError, match="NOT_FOUND"):
        client.healthy("no-such-pool")


def test_a_service_of_another_kind(connect):
    server = grpc.server(ThreadPoolExecutor(1))
    address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    server.start()
    try:
        with pytest.raises(ServiceError, match=r"UNIMPLEMENTED: .* lacks this call .*: is it a vitfleet"):
            connect(address).list_models()
        with pytest.raises(ServiceError, match="UNIMPLEMENTED"):
            connect(address).healthy()
    finally:
        server.stop(None)


def test_closed(client):
    client.list_models()
    client.close()
    client.close()
    with pytest.raises(RuntimeError, match="is closed: make a new one"):
        client.encode_images([b"x"])


def test_context_manager(running):
    with EncoderClient(running.address) as client:
        assert client.healthy()
    with pytest.raises(RuntimeError, match="EncoderClient is closed"):
        client.list_models()


def test_threads_share_a_client(running):
    with EncoderClient(running.address, batch_size=2) as client, ThreadPoolExecutor(8) as pool:
        payloads = [[f"{number}/{item}".encode() for item in range(5)] for number in range(16)]
        for rows, vectors in zip(payloads, pool.map(client.encode_images, payloads), strict=True):
            np.testing.assert_array_equal(vectors, expected_rows(rows))


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """server.pem and client.pem with their keys, each its own authority; the server is called pool.example."""
    folder = tmp_path_factory.mktemp("certificates")
    for name, subject in (("server", "pool.example"), ("client", "somebody")):
        pair = self_signed(subject)
        (folder / f"{name}.pem").write_bytes(pair.certificate)
        (folder / f"{name}.key").write_bytes(pair.key)
    return folder


@pytest.fixture(params=[False, True], ids=["tls", "mutual"])
def secured(request: pytest.FixtureRequest, certificates: Path):
    """A service with TLS, and whether it asks for the client's certificate."""
    pair = (certificates / "server.key").read_bytes(), (certificates / "server.pem").read_bytes()
    authority = (certificates / "client.pem").read_bytes() if request.param else None
    running = start(grpc.ssl_server_credentials([pair], authority, require_client_auth=request.param))
    yield running, request.param
    running.server.stop(None).wait()


def test_tls(connect, certificates, secured: tuple[Running, bool]):
    running, mutual = secured
    settings = {"root_certificates": certificates / "server.pem", "server_name": "pool.example", "token": "t"}
    if mutual:
        with pytest.raises(ServiceError, match="UNAVAILABLE"):
            connect(running.address, retries=0, **settings).list_models()
        key = (certificates / "client.key").read_bytes()
        settings |= {"client_certificate": str(certificates / "client.pem"), "client_key": key}
    client = connect(running.address, **settings)
    assert client.healthy()
    np.testing.assert_array_equal(client.encode_images([b"x"]), expected_rows([b"x"]))
    assert running.service.seen[-1].metadata["authorization"] == "Bearer t"


def test_a_certificate_that_is_not_trusted(connect, certificates, secured: tuple[Running, bool]):
    running, _ = secured
    client = connect(running.address, retries=0, root_certificates=certificates / "client.pem")
    with pytest.raises(ServiceError, match=r"no TLS connection to .*: check root_certificates= and server_name="):
        client.list_models()
    client = connect(running.address, retries=0, tls=True)
    with pytest.raises(ServiceError, match="no TLS connection to"):
        client.list_models()


def test_a_certificate_file_that_is_not_there(connect, tmp_path):
    with pytest.raises(ValueError, match=r"root_certificates: cannot read .*ca.pem: No such file"):
        connect(root_certificates=tmp_path / "ca.pem").list_models()


def test_the_import_is_light(running):
    code = f"""
import sys
from encoder.client import AsyncEncoderClient, EncoderClient
with EncoderClient({running.address!r}) as client:
    client.encode_images([b"x"])
    client.encode_text(["x"])
print([name for name in ("torch", "ray", "transformers", "PIL", "pydantic") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n"


def test_pil_comes_with_the_first_pil_image(running):
    code = f"""
import sys
import numpy as np
from encoder.client import EncoderClient
with EncoderClient({running.address!r}) as client:
    client.encode_images([np.zeros((2, 2), np.uint8)])
    assert "encoder.client.pil" not in sys.modules
    from PIL import Image
    client.encode_images([Image.new("L", (2, 2))])
    assert "encoder.client.pil" in sys.modules
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
