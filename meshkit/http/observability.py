"""`/live`, `/health`, `/metrics` and further routes of a service over HTTP, in its own event loop."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from meshkit.http.server import HttpServer
from meshkit.telemetry.metrics import CONTENT_TYPE


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
        self._server = HttpServer(listen, app, field="http_listen", stop_grace_s=stop_grace_s)

    async def start(self) -> str:
        """Bind and serve; returns the bound address ("HOST:PORT" or "unix:PATH").

        Raises:
            FailedPrecondition: the address cannot be bound.
        """
        return await self._server.start()

    async def stop(self) -> None:
        """Stop listening, give running responses their grace, end. Does nothing if not started."""
        await self._server.stop()

    async def _get_health(self, _: Request) -> Response:
        report = self._health()
        body = {"serving": report.serving, "parts": report.parts}
        return JSONResponse(body, status_code=200 if report.serving else 503)

    async def _get_metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE)


async def _get_live(_: Request) -> Response:
    """That it answers says all: the process is there, and nothing holds its event loop."""
    return Response(status_code=200)
