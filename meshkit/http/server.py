"""An HTTP server in the service's own event loop: binds, serves one ASGI application, stops in order."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

from meshkit.address import TcpAddress, UnixAddress, parse_listen
from meshkit.errors import FailedPrecondition
from meshkit.telemetry.logging import get_logger

log = get_logger(__name__)

DATE_INTERVAL_S = 1.0
"""Between two looks at the clock for the header `date`, which tells whole seconds."""


class HttpServer:
    """Serves `app` at `listen`: "HOST:PORT" (port 0 picks a free one) or "unix:PATH".

    field: the configuration's, for errors. tls: None for plain text.
    stop_grace_s: seconds that running responses get at `stop`.
    send_buffer_bytes: what the kernel holds of each connection for a client that does not read (it takes
        twice that); None: as it likes, which may be megabytes.

    Raises:
        InvalidArgument: `listen` has no known form.
    """

    def __init__(
        self,
        listen: str,
        app: ASGIApp,
        *,
        field: str,
        stop_grace_s: int = 1,
        tls: ssl.SSLContext | None = None,
        send_buffer_bytes: int | None = None,
    ) -> None:
        self._send_buffer_bytes = send_buffer_bytes
        self._listen = parse_listen(listen, field=field)
        self._field = field
        config = uvicorn.Config(
            app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False,
            server_header=False, timeout_graceful_shutdown=stop_grace_s,
        )  # fmt: skip
        config.load()
        config.ssl = tls
        self._server = _EmbeddedServer(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Bind and serve; returns the bound address ("HOST:PORT" or "unix:PATH").

        Raises:
            FailedPrecondition: the address cannot be bound.
        """
        sock = self._bind()
        address = _bound_address(sock, self._listen)
        self._serving = asyncio.create_task(self._server.serve(sockets=[sock]), name=self._field)
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait({self._serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not self._server.ready.is_set():
            ready.cancel()
            await self._serving  # It ended before it was ready: raise why.
        log.info("http server listens", address=address, field=self._field)
        return address

    async def stop(self) -> None:
        """Stop listening, give running responses their grace, end. Does nothing if not started."""
        if self._serving is not None:
            self._server.end()
            await self._serving
            self._serving = None

    def _bind(self) -> socket.socket:
        listen = self._listen
        if isinstance(listen, UnixAddress):
            sock = socket.socket(socket.AF_UNIX)
        else:
            sock = socket.socket(socket.AF_INET6 if ":" in listen.host else socket.AF_INET)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if self._send_buffer_bytes is not None:  # Connections have it from their listener.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self._send_buffer_bytes)
        try:
            sock.bind(listen.path if isinstance(listen, UnixAddress) else (listen.host, listen.port))
        except OSError as error:
            sock.close()
            raise FailedPrecondition(
                f"{self._field}: {listen} cannot be bound ({error.strerror}). "
                "Free it, or give another address (port 0 picks a free one)",
                field=self._field,
                reason="ADDRESS_IN_USE",
                address=listen,
            ) from error
        return sock


class _EmbeddedServer(uvicorn.Server):
    """A uvicorn server that leaves signals to the service, says when it listens, and sleeps while idle."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()
        self._ending = asyncio.Event()

    def end(self) -> None:
        """Stop listening, give running responses their grace; then `serve` returns."""
        self.should_exit = True
        self._ending.set()

    async def main_loop(self) -> None:
        """Not uvicorn's own, which looks ten times a second whether it is to end: a service has up to three
        servers, and where processors compute the model, too, each wake-up takes time from it.
        """
        while not await self.on_tick(0):
            with contextlib.suppress(asyncio.TimeoutError):
                await asyncio.wait_for(self._ending.wait(), DATE_INTERVAL_S)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.ready.set()


def _bound_address(sock: socket.socket, listen: TcpAddress | UnixAddress) -> str:
    if isinstance(listen, UnixAddress):
        return str(listen)
    return str(TcpAddress(listen.host, sock.getsockname()[1]))
