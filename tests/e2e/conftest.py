"""One fleet for all end-to-end tests: a real Ray Serve behind HAProxy, a real router, the demo model."""

from collections.abc import Iterator

import pytest

from deployments.local import LocalFleet
from deployments.settings import LocalSettings, ServeSettings


@pytest.fixture(scope="session")
def fleet() -> Iterator[LocalFleet]:
    serve = ServeSettings(grpc_port=0, http_port=0, drain_period_s=1.0)
    with LocalFleet(LocalSettings(serve=serve, router_port=0)) as running:
        yield running


@pytest.fixture(scope="session")
def address(fleet: LocalFleet) -> str:
    return fleet.addresses.router
