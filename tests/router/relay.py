"""A TCP relay that can go silent: the other side stays connected and hears nothing, as behind a lost network."""

import asyncio
from contextlib import suppress


class Relay:
    """Passes bytes on between whoever connects and `port` on this machine, until it is `silenced`."""

    def __init__(self, port: int) -> None:
        self._target = port
        self._silent = False
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: list[asyncio.StreamWriter] = []
        self._server: asyncio.Server | None = None

    @property
    def address(self) -> str:
        assert self._server is not None
        return f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    def silence(self) -> None:
        """From now on nothing comes through in either direction, and nothing is closed."""
        self._silent = True

    async def __aenter__(self) -> "Relay":
        self._server = await asyncio.start_server(self._connect, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in list(self._tasks):
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        for writer in self._writers:
            writer.close()

    async def _connect(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        other_reader, other_writer = await asyncio.open_connection("127.0.0.1", self._target)
        self._writers += [writer, other_writer]
        for source, sink in ((reader, other_writer), (other_reader, writer)):
            task = asyncio.create_task(self._pump(source, sink))
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter) -> None:
        with suppress(ConnectionError):
            while data := await source.read(65536):
                if not self._silent:
                    sink.write(data)
                    await sink.drain()
        if not self._silent:
            sink.close()
