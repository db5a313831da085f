"""TLS over real sockets: who gets in, and what happens when the files change."""

import io
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import pytest

from deployments.router.server import Router
from deployments.router.watched import signature
from encoder.errors import InvalidInput
from encoder.v1 import encoder_pb2_grpc

from .certificates import Authority, Pair
from .fake_pool import FakePool, PoolServer
from .harness import NOWHERE, Fleet, eventually, failure_of, fleet, images, settings_for

Code = grpc.StatusCode


def trusting(authority: Authority, own: Pair | None = None) -> grpc.ChannelCredentials:
    return grpc.ssl_channel_credentials(
        authority.pem, own.key if own is not None else None, own.certificate if own is not None else None
    )


@asynccontextmanager
async def connected(
    started: Fleet, credentials: grpc.ChannelCredentials | None
) -> AsyncIterator[encoder_pb2_grpc.EncoderServiceStub]:
    """A connection of its own."""
    # Else gRPC would take a connection that is open already.
    options = (("grpc.use_local_subchannel_pool", 1),)
    address = f"127.0.0.1:{started.router.port}"
    if credentials is None:
        channel = grpc.aio.insecure_channel(address, options=options)
    else:
        channel = grpc.aio.secure_channel(address, credentials, options=options)
    async with channel:
        yield encoder_pb2_grpc.EncoderServiceStub(channel)


async def is_served(started: Fleet, credentials: grpc.ChannelCredentials | None) -> bool:
    async with connected(started, credentials) as stub:
        try:
            answer = await stub.EncodeImages(images(b"x"), timeout=10)
        except grpc.aio.AioRpcError as error:
            assert error.code() is Code.UNAVAILABLE
            return False
        return answer.results[0].HasField("embedding")


async def test_only_encrypted_calls_that_trust_the_certificate_are_served(tmp_path: Path) -> None:
    ours, other = Authority("ours"), Authority("other")
    certificate, key = ours.issue().write(tmp_path, "server")
    tls = {"certificate": certificate, "key": key}
    async with fleet(FakePool("vision-cpu"), tls=tls, credentials=trusting(ours)) as started:
        assert await is_served(started, trusting(ours))
        # A certificate of one's own changes nothing where none is asked for.
        assert await is_served(started, trusting(ours, other.issue("client")))
        assert not await is_served(started, trusting(other))
        assert not await is_served(started, None)


async def test_a_client_must_show_a_certificate_that_the_clients_ca_has_signed(tmp_path: Path) -> None:
    ours, clients, other = Authority("ours"), Authority("clients"), Authority("other")
    certificate, key = ours.issue().write(tmp_path, "server")
    (tmp_path / "clients.pem").write_bytes(clients.pem)
    tls = {"certificate": certificate, "key": key, "client_ca": tmp_path / "clients.pem"}
    known = trusting(ours, clients.issue("client"))
    async with fleet(FakePool("vision-cpu"), tls=tls, credentials=known) as started:
        assert await is_served(started, known)
        assert not await is_served(started, trusting(ours))
        assert not await is_served(started, trusting(ours, other.issue("client")))
        # Signed by the same authority as the server is not signed by the clients'.
        assert not await is_served(started, trusting(ours, ours.issue("client")))

        # Another clients' CA holds for the next connection.
        (tmp_path / "clients.pem").write_bytes(other.pem)
        assert await is_served(started, trusting(ours, other.issue("client")))
        assert not await is_served(started, trusting(ours, clients.issue("client")))


async def test_a_new_certificate_is_taken_without_a_restart(tmp_path: Path) -> None:
    before, after = Authority("before"), Authority("after")
    certificate, key = before.issue().write(tmp_path, "server")
    tls = {"certificate": certificate, "key": key}
    async with (
        fleet(FakePool("vision-cpu"), tls=tls, credentials=trusting(before), metrics_port=0) as started,
        connected(started, trusting(before)) as open_before,
    ):
        await open_before.EncodeImages(images(b"x"), timeout=10)
        after.issue().write(tmp_path, "server")
        assert await is_served(started, trusting(after))
        assert not await is_served(started, trusting(before))
        # A connection that is open stays so.
        await open_before.EncodeImages(images(b"x"), timeout=10)
        assert (
            started.router.metrics.registry.get_sample_value(
                "vitfleet_router_reloads_total", {"file": "certificate", "outcome": "loaded"}
            )
            == 1.0
        )


async def test_files_that_do_not_fit_together_are_told_once_and_not_used(tmp_path: Path, lines: io.StringIO) -> None:
    before, after = Authority("before"), Authority("after")
    certificate, key = before.issue().write(tmp_path, "server")
    tls = {"certificate": certificate, "key": key}
    async with fleet(FakePool("vision-cpu"), tls=tls, credentials=trusting(before)) as started:
        new = after.issue()
        # Between the writing of the certificate and that of its key.
        certificate.write_bytes(new.certificate)
        for _ in range(3):
            assert await is_served(started, trusting(before))
        certificate.unlink()
        assert await is_served(started, trusting(before))
        certificate.write_bytes(new.certificate)
        key.write_bytes(new.key)
        assert await is_served(started, trusting(after))
    told = [json.loads(line) for line in lines.getvalue().splitlines()]
    refused = [line["reason"] for line in told if line["event"] == "certificate_refused"]
    assert len(refused) == 2
    assert "do not belong together" in refused[0]
    assert "No such file" in refused[1]
    assert sum(line["event"] == "certificate_loaded" for line in told) == 1
    assert "PRIVATE KEY" not in lines.getvalue()


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("no certificate", "No such file"),
        ("no key", "No such file"),
        ("other key", "key and certificate do not belong together"),
        ("encrypted key", "the key is encrypted"),
        ("no PEM", "PEM"),
        ("client_ca no PEM", "PEM"),
    ],
)
async def test_unusable_files_end_the_start_with_one_line(tmp_path: Path, damage: str, said: str) -> None:
    authority = Authority("ours")
    certificate, key = authority.issue(password=b"x" if damage == "encrypted key" else None).write(tmp_path, "server")
    (tmp_path / "clients.pem").write_bytes(authority.pem if damage != "client_ca no PEM" else b"nothing")
    if damage == "no certificate":
        certificate.unlink()
    elif damage == "no key":
        key.unlink()
    elif damage == "other key":
        key.write_bytes(authority.issue().key)
    elif damage == "no PEM":
        certificate.write_bytes(b"nothing")
    tls = {"certificate": certificate, "key": key, "client_ca": tmp_path / "clients.pem"}
    router = Router(settings_for([{"name": "p", "address": NOWHERE}], tls=tls))
    with pytest.raises(InvalidInput, match=said) as caught:
        await router.start()
    assert "\n" not in str(caught.value)
    assert str(certificate) in str(caught.value)
    await router.stop()


@pytest.mark.parametrize(
    ("ca", "server_name", "works"),
    [("right", "pool.internal", True), ("right", "", False), ("wrong", "pool.internal", False), (None, "", False)],
)
async def test_connections_to_a_pool_are_encrypted_and_checked(
    tmp_path: Path, ca: str | None, server_name: str, works: bool
) -> None:
    right, wrong = Authority("right"), Authority("wrong")
    for name, authority in (("right", right), ("wrong", wrong)):
        (tmp_path / name).write_bytes(authority.pem)
    # Its certificate names pool.internal alone; the address is an IP address of another name.
    pair = right.issue("pool.internal")
    credentials = grpc.ssl_server_credentials([(pair.key, pair.certificate)])
    pool = FakePool("vision-tls")
    async with PoolServer([pool], credentials=credentials) as server:
        target: dict[str, object] = {"name": "vision-tls", "address": f"localhost:{server.port}"}
        if ca is not None:
            target["tls"] = {"ca": tmp_path / ca, "server_name": server_name}
        async with fleet(FakePool("text", tower="text"), extra=[target]) as started:
            state = started.state("vision-tls")
            if works:
                await started.until_healthy("vision-tls")
                await started.stub.EncodeImages(images(b"x"), timeout=10)
                return
            await eventually(lambda: state.reason != "not probed yet")
            assert not state.healthy
            error = await failure_of(started.stub.EncodeImages(images(b"x"), timeout=10))
            assert error.code() is Code.UNAVAILABLE
    assert not pool.seen


async def test_the_roots_that_grpc_brings_do_not_know_a_pool_of_our_own(tmp_path: Path) -> None:
    pair = Authority("ours").issue()
    credentials = grpc.ssl_server_credentials([(pair.key, pair.certificate)])
    async with PoolServer([FakePool("vision-tls")], credentials=credentials) as server:
        target = {"name": "vision-tls", "address": f"localhost:{server.port}", "tls": {}}
        async with fleet(extra=[target], wait=False) as started:
            await eventually(lambda: started.state("vision-tls").reason != "not probed yet")
            assert not started.state("vision-tls").healthy


@pytest.mark.parametrize("content", [None, b"nothing"])
def test_a_ca_of_a_pool_that_cannot_be_used_is_named(tmp_path: Path, content: bytes | None) -> None:
    ca = tmp_path / "ca.pem"
    if content is not None:
        ca.write_bytes(content)
    with pytest.raises(InvalidInput, match=r"ca\.pem"):
        Router(settings_for([{"name": "p", "address": NOWHERE, "tls": {"ca": ca}}]))


def test_what_counts_as_a_change_of_a_file(tmp_path: Path) -> None:
    first, second, link = tmp_path / "first", tmp_path / "second", tmp_path / "link"
    for path in (first, second):
        path.write_text("same")
    link.symlink_to(first)
    before = signature([link])
    assert signature([link]) == before
    # As a secret is replaced in a container: the link points elsewhere, the content has the same size.
    link.unlink()
    link.symlink_to(second)
    assert signature([link]) != before
    assert signature([tmp_path / "missing"]) == (None,)
