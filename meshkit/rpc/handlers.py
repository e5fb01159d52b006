"""Wrapping of RPC handlers: one function that works for all four call kinds and both styles of streaming."""

from __future__ import annotations

import inspect
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from typing import TYPE_CHECKING, Any, TypeAlias

import grpc
import grpc.aio

if TYPE_CHECKING:  # generic in the stubs only
    Context: TypeAlias = grpc.aio.ServicerContext[Any, Any]
    Handler: TypeAlias = grpc.RpcMethodHandler[Any, Any]
else:
    Context = grpc.aio.ServicerContext
    Handler = grpc.RpcMethodHandler

Proceed = Callable[[], Awaitable[Any]]
Around = Callable[[Context, Proceed], Awaitable[Any]]

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
    """
    kind, make = _KINDS[bool(handler.request_streaming), bool(handler.response_streaming)]
    behaviour = getattr(handler, kind)
    run = _drain(behaviour) if inspect.isasyncgenfunction(behaviour) else behaviour

    async def wrapped(request: Any, context: Context) -> Any:
        return await around(context, lambda: run(request, context))

    return make(
        wrapped,
        request_deserializer=handler.request_deserializer,
        response_serializer=handler.response_serializer,
    )


def _drain(behaviour: Callable[[Any, Context], Any]) -> Callable[[Any, Context], Awaitable[None]]:
    async def run(request: Any, context: Context) -> None:
        # Closing matters when the call is cancelled during a write: the generator's `finally` then runs now,
        # not when the garbage collector comes by.
        async with aclosing(behaviour(request, context)) as messages:
            async for message in messages:
                await context.write(message)

    return run
