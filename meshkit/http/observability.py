"""`/live`, `/health`, `/metrics` and further routes of a service over HTTP, in its own event loop."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import uvicorn
from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from meshkit.address import TcpAddress, UnixAddress, parse_listen
from meshkit.errors import FailedPrecondition
from meshkit.telemetry.logging import get_logger
from meshkit.telemetry.metrics import CONTENT_TYPE

log = get_logger(__name__)


@dataclass(frozen=True)
class HealthReport:
    """serving: may traffic come. parts: one word or sentence per part of the service, for people."""

    serving: bool
    parts: dict[str, str] = field(default_factory=dict)


class ObservabilityServer:
    """HTTP server of one service.

    listen: "HOST:PORT" (port 0 picks a free one) or "unix:PATH".
    health: called at each `/health`; must not block.
    routes: further Starlette routes, tried after ours.
    stop_grace_s: seconds that running responses get at `stop`.

    Raises:
        InvalidArgument: `listen` has no known form.
    """

    def __init__(
        self,
        listen: str,
        registry: CollectorRegistry,
        health: Callable[[], HealthReport],
        *,
        routes: Sequence[BaseRoute] = (),
        stop_grace_s: int = 1,
    ) -> None:
        self._listen = parse_listen(listen, field="http_listen")
        self._registry = registry
        self._health = health
        app = Starlette(
            routes=[
                Route("/live", _get_live),
                Route("/health", self._get_health),
                Route("/metrics", self._get_metrics),
                *routes,
            ]
        )
        config = uvicorn.Config(
            app, http="httptools", ws="none", lifespan="off", log_config=None, access_log=False,
            timeout_graceful_shutdown=stop_grace_s,
        )  # fmt: skip
        self._server = _EmbeddedServer(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self) -> str:
        """Bind and serve; returns the bound address ("HOST:PORT" or "unix:PATH").

        Raises:
            FailedPrecondition: the address cannot be bound.
        """
        sock = self._bind()
        address = _bound_address(sock, self._listen)
        self._serving = asyncio.create_task(self._server.serve(sockets=[sock]), name="http server")
        ready = asyncio.create_task(self._server.ready.wait())
        await asyncio.wait({self._serving, ready}, return_when=asyncio.FIRST_COMPLETED)
        if not self._server.ready.is_set():
            ready.cancel()
            await self._serving  # It ended before it was ready: raise why.
        log.info("http server listens", address=address)
        return address

    async def stop(self) -> None:
        """Stop listening, give running responses their grace, end. Does nothing if not started."""
        if self._serving is not None:
            self._server.should_exit = True
            await self._serving
            self._serving = None

    def _bind(self) -> socket.socket:
        listen = self._listen
        if isinstance(listen, UnixAddress):
            sock = socket.socket(socket.AF_UNIX)
        else:
            sock = socket.socket(socket.AF_INET6 if ":" in listen.host else socket.AF_INET)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind(listen.path if isinstance(listen, UnixAddress) else (listen.host, listen.port))
        except OSError as error:
            sock.close()
            raise FailedPrecondition(
                f"http_listen: {listen} cannot be bound ({error.strerror}). "
                "Free it, or give another address (port 0 picks a free one)",
                field="http_listen",
                reason="ADDRESS_IN_USE",
                address=listen,
            ) from error
        return sock

    async def _get_health(self, _: Request) -> Response:
        report = self._health()
        body = {"serving": report.serving, "parts": report.parts}
        return JSONResponse(body, status_code=200 if report.serving else 503)

    async def _get_metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE)


async def _get_live(_: Request) -> Response:
    """That it answers says all: the process is there, and nothing holds its event loop."""
    return Response(status_code=200)


class _EmbeddedServer(uvicorn.Server):
    """A uvicorn server that leaves signals to the service and says when it listens."""

    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.ready = asyncio.Event()

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
