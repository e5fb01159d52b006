"""A TCP proxy whose traffic can be held, one way or both, delayed or reset; every effect is counted."""

from __future__ import annotations

import asyncio
import contextlib
import enum
import random
import socket
import struct
from dataclasses import dataclass, field

CHUNK_BYTES = 64 * 1024
_CLOSE_WITH_RST = struct.pack("ii", 1, 0)


class Direction(enum.Enum):
    """Of bytes: as seen from the one that connects."""

    TO_SERVER = "to server"
    TO_CLIENT = "to client"


BOTH = (Direction.TO_SERVER, Direction.TO_CLIENT)


@dataclass
class Effects:
    """What a fault has done to traffic. held_bytes: that were kept back here until the heal, by direction; of
    each connection the first piece, as what follows stays with its sender.
    """

    held_bytes: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(BOTH, 0))
    passed_bytes: dict[Direction, int] = field(default_factory=lambda: dict.fromkeys(BOTH, 0))
    delayed_chunks: int = 0
    reset_connections: int = 0
    held_connections: int = 0


class Proxy:
    """One link between two services. Bytes and connections are passed on as they come, until told otherwise.

    upstream: "HOST:PORT" or "unix:PATH" of the server.
    """

    def __init__(self, upstream: str, *, draw: random.Random | None = None) -> None:
        self.address = ""
        self.effects = Effects()
        self._upstream = upstream
        self._draw = draw or random.Random(0)
        self._open = {direction: asyncio.Event() for direction in BOTH}
        self._delay_s = (0.0, 0.0)
        self._resets = False
        self._server: asyncio.AbstractServer | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self._writers: set[asyncio.StreamWriter] = set()
        self.heal()

    def __repr__(self) -> str:
        return f"<Proxy {self.address} to {self._upstream}: {self.effects}>"

    async def open(self) -> str:
        """Listen; returns the address."""
        self._server = await asyncio.start_server(self._accept, "127.0.0.1", 0)
        host, port = self._server.sockets[0].getsockname()[:2]
        self.address = f"{host}:{port}"
        return self.address

    async def close(self) -> None:
        """End every connection and stop to listen."""
        if self._server is not None:
            self._server.close()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ------------------------------------------------------------ faults; effects count from the last one on

    def cut(self, *directions: Direction) -> None:
        """Hold all bytes of these directions, and new connections, until `heal`."""
        self.effects = Effects()
        for direction in directions:
            self._open[direction].clear()

    def delay(self, least_s: float, most_s: float) -> None:
        """Hold every piece of data for a random time, in order."""
        self.effects = Effects()
        self._delay_s = (least_s, most_s)

    def reset(self) -> None:
        """Reset every connection, and each new one at once, until `heal`."""
        self.effects = Effects()
        self._resets = True
        for writer in list(self._writers):
            _abort(writer)
        self.effects.reset_connections = len(self._writers) // 2

    def heal(self) -> None:
        """Pass everything on again, beginning with what was held."""
        self._delay_s = (0.0, 0.0)
        self._resets = False
        for gate in self._open.values():
            gate.set()

    # ------------------------------------------------------------ traffic

    def _accept(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._resets:
            self.effects.reset_connections += 1
            _abort(writer)
            return
        task = asyncio.create_task(self._serve(reader, writer), name=f"connection through {self.address}")
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await self._carry(reader, writer)
        finally:
            writer.close()

    async def _carry(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not self._is_whole():
            # The handshake of a connection needs both directions.
            self.effects.held_connections += 1
            for gate in self._open.values():
                await gate.wait()
        try:
            server_reader, server_writer = await _connect(self._upstream)
        except OSError:
            return  # Nobody listens: the client sees its connection end.
        pair = {writer, server_writer}
        self._writers |= pair
        pumps = [
            asyncio.create_task(self._pump(reader, server_writer, Direction.TO_SERVER)),
            asyncio.create_task(self._pump(server_reader, writer, Direction.TO_CLIENT)),
        ]
        try:
            await asyncio.wait(pumps, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for pump in pumps:
                pump.cancel()
            await asyncio.gather(*pumps, return_exceptions=True)
            self._writers -= pair
            server_writer.close()

    async def _pump(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, direction: Direction
    ) -> None:
        """Pass on until the data ends, which is held as the data is. A broken connection is an end, too."""
        with contextlib.suppress(ConnectionError):
            while chunk := await reader.read(CHUNK_BYTES):
                await self._let_through(len(chunk), direction)
                writer.write(chunk)
                await writer.drain()
        await self._open[direction].wait()

    async def _let_through(self, size: int, direction: Direction) -> None:
        gate = self._open[direction]
        if not gate.is_set():
            self.effects.held_bytes[direction] += size
            await gate.wait()
        elif self._delay_s[1] > 0:
            self.effects.delayed_chunks += 1
            await asyncio.sleep(self._draw.uniform(*self._delay_s))
        self.effects.passed_bytes[direction] += size

    def _is_whole(self) -> bool:
        return all(gate.is_set() for gate in self._open.values())


async def _connect(address: str) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    if address.startswith("unix:"):
        return await asyncio.open_unix_connection(address.removeprefix("unix:"))
    host, _, port = address.rpartition(":")
    return await asyncio.open_connection(host, int(port))


def _abort(writer: asyncio.StreamWriter) -> None:
    """End a connection by a reset, not in order."""
    connection = writer.get_extra_info("socket")
    if connection is not None and not writer.transport.is_closing() and connection.family == socket.AF_INET:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CLOSE_WITH_RST)
    writer.transport.abort()
