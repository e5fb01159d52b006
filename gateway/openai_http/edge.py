"""Around every call: whose it is, its ids, its span, and its error as OpenAI's clients read it."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable

from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from starlette.types import Receive, Scope, Send

from gateway.api_keys import KeyRing
from gateway.openai_http.call import Call, ClientGone
from gateway.openai_http.failures import body_of, retry_after_s, status_of
from gateway.openai_http.translation import restate
from gateway.public_errors import readable_error
from meshkit.errors import Internal, InvalidArgument, MeshError, Unauthenticated
from meshkit.telemetry.logging import get_logger
from meshkit.telemetry.tracing import inject_traceparent, tracer

log = get_logger(__name__)

REQUEST_ID = "x-request-id"
MAX_REQUEST_ID_CHARS = 80
Handler = Callable[[Call], Awaitable[None]]


class Edge:
    """Makes ASGI endpoints of handlers. is_public, on_refused: as `KeyInterceptor` has them."""

    def __init__(self, ring: KeyRing, *, is_public: bool, on_refused: Callable[[], None]) -> None:
        self._ring = ring
        self._is_public = is_public
        self._on_refused = on_refused

    def guard(self, handler: Handler, name: str) -> GuardedEndpoint:
        """`handler` for callers with a key, where keys are asked for. name: of its spans."""
        return GuardedEndpoint(self, handler, name)

    def hides_internals_from(self, call: Call) -> bool:
        """Whether the caller may not see the inside of the mesh."""
        return self._is_public or not call.tenant.is_anonymous

    async def serve(self, call: Call, handler: Handler, span: Span) -> None:
        """Run `handler`; whatever goes wrong is the call's answer, or the last event of its stream."""
        try:
            call.request_id = _request_id(call)
            call.headers[REQUEST_ID] = call.request_id
            self._identify(call)
            await handler(call)
        except asyncio.CancelledError:
            span.set_status(Status(StatusCode.ERROR, "CANCELLED"))
            raise
        except ClientGone:
            span.set_status(Status(StatusCode.ERROR, "CANCELLED"))
        except MeshError as error:
            span.set_status(Status(StatusCode.ERROR, error.code.name))
            public = readable_error(error, call.tenant, is_public=self._is_public)
            await refuse(call, public if call.body is None else restate(public, call.body))
        except Exception:
            error_id = secrets.token_hex(4)
            log.exception("http handler failed", error_id=error_id)
            span.set_status(Status(StatusCode.ERROR, "INTERNAL"))
            await refuse(call, Internal(f"internal error (id {error_id})"))
        finally:
            span.set_attribute("http.response.status_code", call.status or 499)

    def _identify(self, call: Call) -> None:
        try:
            call.tenant = self._ring.identify(call.headers_in.getlist("authorization"))
        except Unauthenticated:
            self._on_refused()
            raise


class GuardedEndpoint:
    """One route, as ASGI calls it. Its span is a child of the caller's."""

    def __init__(self, edge: Edge, handler: Handler, name: str) -> None:
        self._edge = edge
        self._handler = handler
        self._name = name

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive, send)
        parent = propagate.extract(dict(call.headers_in))
        attributes = {"http.request.method": scope["method"], "http.route": self._name}
        span = tracer().start_span(
            f"{scope['method']} {self._name}", context=parent, kind=SpanKind.SERVER, attributes=attributes
        )
        context = trace.set_span_in_context(span, parent)
        token = otel_context.attach(context)
        try:
            traceparent = inject_traceparent(context)
            if traceparent:
                call.headers["traceparent"] = traceparent
            await self._edge.serve(call, self._handler, span)
        finally:
            otel_context.detach(token)
            span.end()


async def refuse(call: Call, error: MeshError, **fields: str) -> None:
    """`error` as the answer, or as an event where the stream has begun, which then ends without [DONE].

    fields: stand in the event beside the error.
    """
    if call.is_begun:
        await call.send_event({**fields, **body_of(error)})
        await call.end_events()
        return
    wait_s = retry_after_s(error)
    headers = {} if wait_s is None else {"retry-after": str(wait_s)}
    await call.answer(status_of(error), body_of(error), headers)


def _request_id(call: Call) -> str:
    given = call.headers_in.get(REQUEST_ID, "")
    if not given:
        return secrets.token_hex(16)
    if len(given) > MAX_REQUEST_ID_CHARS or not (given.isascii() and given.isprintable()):
        call.headers[REQUEST_ID] = secrets.token_hex(16)
        raise InvalidArgument(
            f"{REQUEST_ID} has {len(given)} characters or some that are not printable ASCII; 1 to "
            f"{MAX_REQUEST_ID_CHARS} printable ASCII characters are allowed, or leave it out",
            field=REQUEST_ID,
        )
    return given
