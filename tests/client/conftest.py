"""One suite for both clients: `connect` makes either of them, with the same blocking face."""

import asyncio
import inspect
from collections.abc import Callable, Iterator

import pytest

from encoder.client import AsyncEncoderClient, EncoderClient, RetryPolicy
from tests.client.service import Running, start

QUICK = RetryPolicy(retries=4, first_delay=0.01, longest_delay=0.05)


class Blocked:
    """AsyncEncoderClient with every coroutine run to its end, and its stream as a plain generator."""

    def __init__(self, client: AsyncEncoderClient, runner: asyncio.Runner) -> None:
        self.wrapped = client
        self._runner = runner

    def __getattr__(self, name: str) -> object:
        member = getattr(self.wrapped, name)
        if not callable(member):
            return member

        def call(*args, **options):
            async def inside():
                # In the loop: making a stream opens the channel, which belongs to the loop.
                outcome = member(*args, **options)
                return await outcome if inspect.isawaitable(outcome) else outcome

            outcome = self._runner.run(inside())
            return self._steps(outcome) if inspect.isasyncgen(outcome) else outcome

        return call

    def _steps(self, stream) -> Iterator:
        async def step():
            return await anext(stream, None)

        async def close():
            await stream.aclose()

        try:
            while (result := self._runner.run(step())) is not None:
                yield result
        finally:
            self._runner.run(close())


@pytest.fixture
def running() -> Iterator[Running]:
    running = start()
    yield running
    running.server.stop(None).wait()


@pytest.fixture
def tight() -> Iterator[Running]:
    """A service that takes messages of 4096 bytes at most."""
    running = start(max_message_bytes=4096)
    yield running
    running.server.stop(None).wait()


@pytest.fixture
def service(running: Running):
    return running.service


@pytest.fixture(params=["blocking", "asyncio"])
def connect(request: pytest.FixtureRequest, running: Running) -> Iterator[Callable]:
    """connect(**settings) makes a client of the kind under test for the running service."""
    runner = asyncio.Runner()
    clients: list = []

    def connect(address: str = "", **settings):
        settings = {"retries": QUICK, "timeout": 20.0, **settings}
        address = address or running.address
        if request.param == "blocking":
            clients.append(EncoderClient(address, **settings))
        else:
            clients.append(Blocked(AsyncEncoderClient(address, **settings), runner))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()
    runner.close()


@pytest.fixture
def client(connect: Callable):
    return connect()
