"""A client of HTTP/2 that does as it likes: it need not read, grant windows or wait. Just enough for gRPC."""

from __future__ import annotations

import asyncio
import contextlib
import struct

PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
DATA, HEADERS, RST_STREAM, SETTINGS, PING, GOAWAY, WINDOW_UPDATE = 0x0, 0x1, 0x3, 0x4, 0x6, 0x7, 0x8
ACK = END_STREAM = 0x1
END_HEADERS = 0x4
CANCEL = 0x8
INITIAL_WINDOW_SIZE = 0x4
FRAME_HEADER_BYTES = 9
DEFAULT_WINDOW = 65_535


def frame(kind: int, payload: bytes = b"", *, flags: int = 0, stream: int = 0) -> bytes:
    """One frame."""
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def settings(values: dict[int, int]) -> bytes:
    """A SETTINGS frame."""
    return frame(SETTINGS, b"".join(struct.pack(">HI", key, value) for key, value in values.items()))


def headers(path: str, *, authority: str) -> bytes:
    """Header block of a gRPC request: plain literals, which leave the server's table alone."""
    fields = {
        ":method": "POST",
        ":scheme": "http",
        ":path": path,
        ":authority": authority,
        "content-type": "application/grpc",
        "te": "trailers",
    }
    return b"".join(b"\x00" + _text(name) + _text(value) for name, value in fields.items())


def _text(value: str) -> bytes:
    raw = value.encode()
    if len(raw) >= 0x7F:
        raise ValueError(f"{value!r} is longer than one byte of length can say")
    return bytes([len(raw)]) + raw


def message(body: bytes) -> bytes:
    """A gRPC message."""
    return b"\x00" + struct.pack(">I", len(body)) + body


class RawConnection:
    """One connection. It answers pings and settings, as a live transport does; windows it grants if told.

    window: bytes that the server may send per stream before it has to wait.
    """

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, authority: str) -> None:
        self._reader = reader
        self._writer = writer
        self._authority = authority
        self._next_stream = 1
        self._pump = asyncio.create_task(self._read(), name=f"frames of {authority}")
        self.data_bytes = 0
        self.headers_seen = asyncio.Event()
        """The server has answered something."""
        self.is_over = False
        """The server has ended the connection, or said that it will."""

    def __repr__(self) -> str:
        return f"<RawConnection to {self._authority}, {self.data_bytes} bytes of data, over={self.is_over}>"

    @classmethod
    async def open(cls, address: str, *, window: int = DEFAULT_WINDOW) -> RawConnection:
        """Connect, and say hello."""
        host, _, port = address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        connection = cls(reader, writer, address)
        # The window of the connection as a whole has no setting; it begins with 64 KiB.
        more = frame(WINDOW_UPDATE, struct.pack(">I", window)) if window > DEFAULT_WINDOW else b""
        writer.write(PREFACE + settings({INITIAL_WINDOW_SIZE: window}) + more)
        await connection.flush()
        return connection

    def begin(self, path: str, body: bytes) -> int:
        """Send a whole request, on a new stream; its number."""
        stream, self._next_stream = self._next_stream, self._next_stream + 2
        block = headers(path, authority=self._authority)
        self._writer.write(
            frame(HEADERS, block, flags=END_HEADERS, stream=stream)
            + frame(DATA, message(body), flags=END_STREAM, stream=stream)
        )
        return stream

    def reset(self, stream: int) -> None:
        """Give a stream up."""
        self._writer.write(frame(RST_STREAM, struct.pack(">I", CANCEL), stream=stream))

    def grant(self, size: int, *, stream: int) -> None:
        """Let the server send `size` bytes more, on the stream and in all."""
        update = struct.pack(">I", size)
        self._writer.write(frame(WINDOW_UPDATE, update, stream=stream) + frame(WINDOW_UPDATE, update))

    async def flush(self) -> None:
        """Return when what was written has left. A server that has ended the connection is no error."""
        try:
            await self._writer.drain()
        except ConnectionError:
            self.is_over = True

    async def close(self) -> None:
        """Hang up."""
        self._pump.cancel()
        await asyncio.gather(self._pump, return_exceptions=True)
        self._writer.close()
        with contextlib.suppress(ConnectionError):
            await self._writer.wait_closed()

    async def _read(self) -> None:
        try:
            while True:
                await self._take_frame()
        except (asyncio.IncompleteReadError, ConnectionError):
            self.is_over = True

    async def _take_frame(self) -> None:
        header = await self._reader.readexactly(FRAME_HEADER_BYTES)
        payload = await self._reader.readexactly(int.from_bytes(header[:3], "big"))
        kind, flags = header[3], header[4]
        if kind == DATA:
            self.data_bytes += len(payload)
        elif kind == HEADERS:
            self.headers_seen.set()
        elif kind == SETTINGS and not flags & ACK:
            self._writer.write(frame(SETTINGS, flags=ACK))
        elif kind == PING and not flags & ACK:
            self._writer.write(frame(PING, payload, flags=ACK))
        elif kind == GOAWAY:
            self.is_over = True
