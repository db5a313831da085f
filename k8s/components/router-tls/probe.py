"""Asks the router beside it by grpc.health.v1 over TLS whether it serves; the exit status says so.

It shows the router's own certificate, for a router that asks callers for one.
"""

import sys
from pathlib import Path

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

FOLDER = Path(sys.argv[1] if len(sys.argv) > 1 else "/etc/vitfleet/tls")
ADDRESS = sys.argv[2] if len(sys.argv) > 2 else "127.0.0.1:50051"
NAME = "vitfleet-router"
SERVICE = "encoder.v1.EncoderService"
TIMEOUT_S = 5.0


def serves() -> bool:
    certificate, key = (FOLDER / "tls.crt").read_bytes(), (FOLDER / "tls.key").read_bytes()
    authority = FOLDER / "ca.crt"
    roots = authority.read_bytes() if authority.exists() else certificate
    credentials = grpc.ssl_channel_credentials(roots, key, certificate)
    options = (("grpc.ssl_target_name_override", NAME),)
    with grpc.secure_channel(ADDRESS, credentials, options=options) as channel:
        request = health_pb2.HealthCheckRequest(service=SERVICE)
        answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=TIMEOUT_S)
    return answer.status == health_pb2.HealthCheckResponse.SERVING


if __name__ == "__main__":
    try:
        sys.exit(0 if serves() else 1)
    except grpc.RpcError as error:
        print(f"the router does not answer: {error.code().name}")
        sys.exit(1)
