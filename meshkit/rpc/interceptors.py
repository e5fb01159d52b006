"""Server interceptors: errors become statuses, calls become spans."""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Collection
from typing import NoReturn

import grpc
import grpc.aio
from google.protobuf.message import DecodeError
from grpc_status import rpc_status
from opentelemetry import context as otel_context
from opentelemetry import propagate, trace
from opentelemetry.trace import Span, SpanKind, Status, StatusCode

from meshkit.errors import Cancelled, Internal, InvalidArgument, MeshError, to_status
from meshkit.rpc.handlers import Around, Context, Handler, Proceed, WrappedHandlers
from meshkit.telemetry.logging import get_logger
from meshkit.telemetry.tracing import is_traced_method, tracer

log = get_logger(__name__)

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]]


class ErrorMappingInterceptor(grpc.aio.ServerInterceptor):
    """Turns what a handler raises into a status.

    MeshError: its rich status. AbortError: passes, the handler has spoken. CancelledError: raised again;
    where the client is still there it gets CANCELLED first, since grpc.aio would leave it waiting for its
    deadline. A write to a client that has gone: CancelledError, as if the news had come first. DecodeError: a
    message that does not parse, INVALID_ARGUMENT. Anything else: INTERNAL with an id; the text and the
    traceback go to the log only.
    """

    def __init__(self) -> None:
        self._handlers = WrappedHandlers(_map_errors)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        return None if handler is None else self._handlers.wrap(handler, handler_call_details.method)


def _map_errors(method: str) -> Around:
    async def around(context: Context, proceed: Proceed) -> object:
        try:
            return await proceed()
        except grpc.aio.AbortError:
            raise
        except asyncio.CancelledError:
            await _answer_cancelled(context)
            raise
        except MeshError as error:
            await _abort(context, error)
        except grpc.aio.InternalError as error:
            raise _client_gone() from error
        except DecodeError:
            await _abort(context, _malformed(method))
        except Exception:
            error_id = secrets.token_hex(4)
            log.exception("handler failed", method=method, error_id=error_id)
            await _abort(context, Internal(f"internal error (id {error_id})", error_id=error_id))

    return around


async def _abort(context: Context, error: MeshError) -> NoReturn:
    try:
        await context.abort_with_status(rpc_status.to_status(to_status(error)))
    except grpc.aio.InternalError as failure:
        raise _client_gone() from failure


def _malformed(method: str) -> InvalidArgument:
    return InvalidArgument(
        f"a message sent to {method} does not parse as what the method takes; generate the client's code "
        "from this version's protos",
        reason="MALFORMED_MESSAGE",
    )


def _client_gone() -> asyncio.CancelledError:
    # grpc.aio raises InternalError from an operation on a call that is over; the context does not say so.
    return asyncio.CancelledError("the client has gone")


async def _answer_cancelled(context: Context) -> None:
    try:
        await _abort(context, Cancelled("the server gave this call up"))
    except (grpc.aio.BaseError, asyncio.CancelledError):
        return  # Sent, or nobody is there; the caller of this function raises its own CancelledError on.


class ServerTracingInterceptor(grpc.aio.ServerInterceptor):
    """One SERVER span per call, child of the caller's; it ends with the call and has its status.

    excluded: full method names ("/package.Service/Method") without a span, such as long-lived internal
    streams whose requests carry their own context. Health checks and reflection are never traced.
    """

    def __init__(self, *, excluded: Collection[str] = ()) -> None:
        self._excluded = frozenset(excluded)
        self._handlers = WrappedHandlers(_trace)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        method = handler_call_details.method
        if handler is None or method in self._excluded or not is_traced_method(method):
            return handler
        return self._handlers.wrap(handler, method)


def _trace(method: str) -> Around:
    async def around(context: Context, proceed: Proceed) -> object:
        parent = propagate.extract(_text_metadata(context))
        span = tracer().start_span(method.lstrip("/"), context=parent, kind=SpanKind.SERVER)
        token = otel_context.attach(trace.set_span_in_context(span, parent))
        try:
            result = await proceed()
            set_span_status(span, _status_of(context))
            return result
        except asyncio.CancelledError:
            set_span_status(span, _why_cancelled(context))
            raise
        except MeshError as error:
            set_span_status(span, error.code)
            raise
        except grpc.aio.AbortError:
            set_span_status(span, _status_of(context))
            raise
        except BaseException as error:
            span.record_exception(error)
            set_span_status(span, grpc.StatusCode.UNKNOWN)
            raise
        finally:
            otel_context.detach(token)
            span.end()

    return around


def set_span_status(span: Span, code: grpc.StatusCode) -> None:
    """Write a call's final status on its span: the name as an attribute, ERROR for anything but OK."""
    span.set_attribute("rpc.system", "grpc")
    span.set_attribute("rpc.grpc.status_code", int(code.value[0]))
    if code is not grpc.StatusCode.OK:
        span.set_status(Status(StatusCode.ERROR, code.name))


def _status_of(context: Context) -> grpc.StatusCode:
    """The status that the handler set or aborted with. grpc.aio gives it as enum, number or, unset, None."""
    code: object = context.code()
    if isinstance(code, grpc.StatusCode):
        return code
    return next((known for known in grpc.StatusCode if known.value[0] == code), grpc.StatusCode.OK)


def _why_cancelled(context: Context) -> grpc.StatusCode:
    """A call is cancelled by its client, or because its time is over: grpc.aio does the same for both."""
    left_s: object = context.time_remaining()  # None where there is no deadline, whatever its type says.
    if isinstance(left_s, float | int) and left_s <= 0:
        return grpc.StatusCode.DEADLINE_EXCEEDED
    return grpc.StatusCode.CANCELLED


def _text_metadata(context: Context) -> dict[str, str]:
    return {key: value for key, value in context.invocation_metadata() or () if isinstance(value, str)}
