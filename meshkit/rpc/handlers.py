"""Wrapping of RPC handlers: one function that works for all four call kinds and both styles of streaming."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

if TYPE_CHECKING:  # generic in the stubs only
    Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
    Handler: TypeAlias = grpc.RpcMethodHandler[Any, Any]
else:
    Context = grpc.aio.ServicerContext
    Handler = grpc.RpcMethodHandler

Proceed = Callable[[], Awaitable[Any]]
Around = Callable[[Context, Proceed], Awaitable[Any]]
Behaviour = Callable[[Any, Context], Awaitable[Any]]

_KINDS: dict[tuple[bool, bool], tuple[str, Callable[..., Handler]]] = {
    (False, False): ("unary_unary", grpc.unary_unary_rpc_method_handler),
    (False, True): ("unary_stream", grpc.unary_stream_rpc_method_handler),
    (True, False): ("stream_unary", grpc.stream_unary_rpc_method_handler),
    (True, True): ("stream_stream", grpc.stream_stream_rpc_method_handler),
}


def wrap_handler(handler: Handler, around: Around) -> Handler:
    """A handler of the same kind that runs `await around(context, proceed)`; `proceed()` runs the old one.

    An async generator becomes a coroutine that writes each message to the context, so `around` sees the whole
    life of the call in one frame, whatever the kind, and the generator is closed before `around` goes on.
    A request that does not parse is a DecodeError from `proceed()`: grpc.aio itself would answer UNKNOWN,
    with the exception's text.
    """
    kind, make = _KINDS[bool(handler.request_streaming), bool(handler.response_streaming)]
    behaviour = getattr(handler, kind)
    run = _drain(behaviour) if inspect.isasyncgenfunction(behaviour) else behaviour
    read = handler.request_deserializer
    # Of a stream, reading raises by itself, inside of the handler.
    if read is not None and not handler.request_streaming and not isinstance(read, _LenientReader):
        read, run = _LenientReader(read), _refuse_malformed(run)

    async def wrapped(request: Any, context: Context) -> Any:
        return await around(context, lambda: run(request, context))

    return make(wrapped, request_deserializer=read, response_serializer=handler.response_serializer)


class WrappedHandlers:
    """The wrapped handlers of one interceptor, each made at its method's first call and kept: as many as the
    server has methods, since one that it does not have has no handler.
    """

    def __init__(self, around_of: Callable[[str], Around]) -> None:
        self._around_of = around_of
        self._made: dict[str, tuple[Handler, Handler]] = {}

    def wrap(self, handler: Handler, method: str) -> Handler:
        """`handler` of `method`, run by `around_of(method)`."""
        made = self._made.get(method)
        if made is None or made[0] is not handler:
            made = self._made[method] = handler, wrap_handler(handler, self._around_of(method))
        return made[1]


@dataclass(frozen=True)
class _Malformed:
    """In place of a request that does not parse."""

    error: DecodeError


@dataclass(frozen=True)
class _LenientReader:
    """Reads requests; of one that does not parse it keeps the error."""

    read: Callable[[bytes], Any]

    def __call__(self, data: bytes) -> Any:
        try:
            return self.read(data)
        except DecodeError as error:
            return _Malformed(error)


def _refuse_malformed(run: Behaviour) -> Behaviour:
    async def run_or_refuse(request: Any, context: Context) -> Any:
        if isinstance(request, _Malformed):
            raise request.error
        return await run(request, context)

    return run_or_refuse


def _drain(behaviour: Callable[[Any, Context], Any]) -> Behaviour:
    async def run(request: Any, context: Context) -> None:
        # Closing matters when the call is cancelled during a write: the generator's `finally` then runs now,
        # not when the garbage collector comes by.
        async with aclosing(behaviour(request, context)) as messages:
            async for message in messages:
                await context.write(message)

    return run
