"""The listener of OpenAI's interface: its routes, and what stands beside the completions."""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import BaseRoute, Route

from gateway.generation import Generations
from gateway.models import ServedModel
from gateway.openai_http.answers import now
from gateway.openai_http.call import Call
from gateway.openai_http.edge import Edge
from gateway.openai_http.endpoints import CompletionEndpoints
from gateway.openai_http.failures import body_of
from gateway.openai_http.openapi import describe
from meshkit.errors import NotFound, PermissionDenied, Unimplemented
from meshkit.http.observability import HealthReport
from meshkit.http.server import HttpServer
from meshkit.telemetry.metrics import CONTENT_TYPE

SEND_BUFFER_BYTES = 64 * 1024
"""Of each connection in the kernel: tokens that a slow client does not read wait here as tokens, not there as
events, of which the kernel would else hold megabytes for each."""


class OpenAiServer:
    """Serves OpenAI's interface on the gateway's loop, and `further` routes beside it.

    Raises:
        InvalidArgument: `listen` has no known form.
    """

    def __init__(
        self,
        listen: str,
        *,
        generations: Generations,
        edge: Edge,
        registry: CollectorRegistry,
        health: Callable[[], HealthReport],
        tls: ssl.SSLContext | None,
        further: Sequence[BaseRoute] = (),
    ) -> None:
        self._generations = generations
        self._edge = edge
        self._registry = registry
        self._health = health
        self._further = further
        self._opened_at = now()
        self._server = HttpServer(
            listen,
            self._application(),
            field="openai_listen",
            tls=tls,
            send_buffer_bytes=SEND_BUFFER_BYTES,
        )

    async def start(self) -> str:
        """Bind and serve; returns the bound address.

        Raises:
            FailedPrecondition: the address cannot be bound.
        """
        return await self._server.start()

    async def stop(self) -> None:
        """Stop listening and end."""
        await self._server.stop()

    def _application(self) -> Starlette:
        completions = CompletionEndpoints(self._generations)
        guarded = [
            ("POST", "/v1/chat/completions", completions.chat),
            ("POST", "/v1/completions", completions.complete),
            ("POST", "/v1/embeddings", _refuse_embeddings),
            ("GET", "/v1/models", self._list_models),
            ("GET", "/v1/models/{model:path}", self._get_model),
            ("GET", "/metrics", self._get_metrics),
        ]
        routes: list[BaseRoute] = [
            Route(path, self._edge.guard(each, path), methods=[verb]) for verb, path, each in guarded
        ]
        routes += [Route("/health", self._get_health), Route("/openapi.json", _get_description)]
        routes += self._further
        application = Starlette(routes=routes, exception_handlers={HTTPException: _refuse_route})
        application.router.redirect_slashes = False
        return application

    async def _get_health(self, _: Request) -> Response:
        """Whether requests are served, and no word of the inside: it needs no key."""
        serving = self._health().serving
        body = {"status": "ok" if serving else "unavailable"}
        return JSONResponse(body, status_code=200 if serving else 503)

    async def _get_metrics(self, call: Call) -> None:
        if self._edge.hides_internals_from(call):
            raise PermissionDenied(
                "metrics tell of the inside of the mesh; they are read from the gateway's http_listen",
                reason="METRICS_NOT_PUBLIC",
            )
        await call.answer(200, generate_latest(self._registry), kind=CONTENT_TYPE)

    async def _list_models(self, call: Call) -> None:
        models = [self._model(model) for model in self._generations.models]
        await call.answer(200, {"object": "list", "data": models})

    async def _get_model(self, call: Call) -> None:
        await call.answer(200, self._model(self._generations.models.find(call.path_parameters["model"])))

    def _model(self, model: ServedModel) -> dict[str, Any]:
        """max_model_len as vLLM and SGLang tell it, meta.n_vocab as llama.cpp does."""
        return {
            "id": model.name,
            "object": "model",
            "created": self._opened_at,
            "owned_by": "chipmesh",
            "max_model_len": model.context_tokens,
            "meta": {"n_vocab": model.vocab_size},
        }


async def _refuse_embeddings(_: Call) -> None:
    # Not 501: OpenAI's clients try a 5xx again, and operators are woken by one.
    raise Unimplemented(
        "this mesh generates text and makes no embeddings; send this to a server of an embedding model",
        reason="UNSUPPORTED_ENDPOINT",
    )


async def _get_description(_: Request) -> Response:
    return JSONResponse(describe())


async def _refuse_route(request: Request, error: Exception) -> Response:
    """A path or a method that there is not, in OpenAI's shape."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    where = f"{request.method} {request.url.path[:200]}"
    if status == 405:
        words, reason = f"{where}: this path takes another method", "METHOD_NOT_ALLOWED"
    else:
        words, reason = f"{where}: there is no such path; the interface begins at /v1", "UNKNOWN_URL"
    headers = error.headers if isinstance(error, HTTPException) else None
    return JSONResponse(body_of(NotFound(words, reason=reason)), status_code=status, headers=headers)
