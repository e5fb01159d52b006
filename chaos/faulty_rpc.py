"""Channels and servers of a service whose messages can be dropped, doubled or reordered on the way.

Channels are wrapped and not intercepted: grpc.aio passes the writes of an intercepted stream through a queue
of its own, and the service would no longer run as it does.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from typing import Any

import grpc
import grpc.aio

from chaos.message_faults import Fault, FaultDesk, Inbox, Lane, Order
from chipmesh.device.v1alpha1 import execution_pb2
from chipmesh.scheduler.v1alpha1 import session_pb2
from meshkit.errors import MeshError, Unavailable
from meshkit.rpc.handlers import Context, Handler, wrap_handler
from meshkit.rpc.interceptors import Continuation

ATTACH = "/chipmesh.device.v1alpha1.ExecutionService/Attach"
EXECUTE_STEPS = "/chipmesh.device.v1alpha1.ExecutionService/ExecuteSteps"
OPEN_SESSION = "/chipmesh.scheduler.v1alpha1.SessionService/OpenSession"
REGISTRY = "/chipmesh.scheduler.v1alpha1.WorkerRegistryService/"

Send = Callable[[Any], Awaitable[Any]]


class UnaryFaults:
    """Faults of calls, each from one caller to one service."""

    def __init__(self, desk: FaultDesk) -> None:
        self._desk = desk
        self._send: dict[str, Send] = {}
        """How a call is made now: the channel of the last one may be closed."""
        self._held: dict[str, tuple[Order, Any, float]] = {}
        self._copies: dict[tuple[str, str], tuple[Order, Any, float]] = {}

    async def call(
        self, where: str, request: Any, send: Send, *, who: str, lost: Callable[[], Exception]
    ) -> Any:
        """Make a call by `send(request)`, or what its fault makes of it.

        who: calls of one who is the same come one after the other.

        Raises:
            lost(): it, or its answer, never arrives.
        """
        self._send[where] = send
        order = self._desk.take(where, who=who)
        if order is None:
            answer = await send(request)
            await self._deliver(self._held.pop(who, None))
            await self._deliver(self._copies.pop((where, who), None))
            return answer
        if order.fault == Fault.REORDER:
            self._held[who] = (order, request, self._desk.now())
            raise lost()
        if order.fault == Fault.DROP:
            self._desk.happened(order)
            raise lost()
        answer = await send(request)
        if order.fault == Fault.LATE_COPY:
            self._copies[where, who] = (order, request, self._desk.now())
            return answer
        if order.fault == Fault.DUPLICATE:
            await _and_ignore_refusal(send(request))
        self._desk.happened(order)
        if order.fault == Fault.LOSE_ANSWER:
            raise lost()
        return answer

    async def _deliver(self, late: tuple[Order, Any, float] | None) -> None:
        if late is not None:
            order, request, since = late
            await _and_ignore_refusal(self._send[order.where](request))
            self._desk.happened(order, at=since)


async def _and_ignore_refusal(answer: Awaitable[Any]) -> None:
    """Of a call that nobody waits for: being refused is one good answer to it."""
    try:
        await answer
    except (MeshError, grpc.aio.AioRpcError):
        return


# ---------------------------------------------------------------- what the service calls


class FaultyChannel:
    """A channel to an executor."""

    def __init__(self, channel: grpc.aio.Channel, target: str, desk: FaultDesk, calls: UnaryFaults) -> None:
        self._channel = channel
        self._target = target
        self._desk = desk
        self._calls = calls

    def __getattr__(self, name: str) -> Any:
        return getattr(self._channel, name)

    async def __aenter__(self) -> FaultyChannel:
        await self._channel.__aenter__()
        return self

    async def __aexit__(self, *error: Any) -> None:
        await self._channel.__aexit__(*error)

    def unary_unary(self, method: str, *args: Any, **options: Any) -> Any:
        """As grpc.aio.Channel's."""
        plain = self._channel.unary_unary(method, *args, **options)
        if method != ATTACH:
            return plain

        async def attach(request: Any, **call_options: Any) -> Any:
            async def send(request: Any) -> Any:
                return await plain(request, **call_options)

            return await self._calls.call("attach", request, send, who=self._target, lost=_unanswered)

        return attach

    def stream_stream(self, method: str, *args: Any, **options: Any) -> Any:
        """As grpc.aio.Channel's."""
        plain = self._channel.stream_stream(method, *args, **options)
        if method != EXECUTE_STEPS:
            return plain
        return lambda *args, **options: FaultyStepCall(plain(*args, **options), self._desk)


def _unanswered() -> Exception:
    return grpc.aio.AioRpcError(
        grpc.StatusCode.UNAVAILABLE, grpc.aio.Metadata(), grpc.aio.Metadata(), "lost on the way"
    )


class FaultyStepCall:
    """ExecuteSteps: plans out, results in."""

    def __init__(self, call: Any, desk: FaultDesk) -> None:
        self._call = call
        self._plans: Lane[execution_pb2.ExecuteStepsRequest] = Lane(desk, "plans", _nothing_particular)
        self._results: Inbox[execution_pb2.ExecuteStepsResponse] = Inbox(
            Lane(desk, "results", _nothing_particular)
        )

    def __getattr__(self, name: str) -> Any:
        return getattr(self._call, name)

    async def write(self, message: execution_pb2.ExecuteStepsRequest) -> None:
        """As grpc.aio's."""
        for each in self._plans.pass_on(message):
            await self._call.write(each)

    async def read(self) -> Any:
        """As grpc.aio's."""
        return await self._results.read(self._call.read, lambda message: message is grpc.aio.EOF)


def _nothing_particular(message: Any) -> Collection[str]:
    del message
    return ()


# ---------------------------------------------------------------- what calls the service


class FaultyServices(grpc.aio.ServerInterceptor):
    """Faults of what comes to a scheduler: sessions and registrations."""

    def __init__(self, desk: FaultDesk) -> None:
        self._desk = desk
        self._calls = UnaryFaults(desk)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        """As grpc's."""
        handler = await continuation(handler_call_details)
        method = str(handler_call_details.method)
        if handler is None:
            return None
        if method == OPEN_SESSION:
            return self._session(handler)
        if method.startswith(REGISTRY):
            return self._registry(handler, method.removeprefix(REGISTRY).lower())
        return handler

    def _registry(self, handler: Handler, where: str) -> Handler:
        behaviour: Any = handler.unary_unary

        async def answer(request: Any, context: Context) -> Any:
            async def send(request: Any) -> Any:
                return await behaviour(request, context)

            return await self._calls.call(where, request, send, who=request.worker_id, lost=_refused)

        return grpc.unary_unary_rpc_method_handler(
            answer, handler.request_deserializer, handler.response_serializer
        )

    def _session(self, handler: Handler) -> Handler:
        # By way of `wrap_handler`, which makes one style of both: every message is written to the context.
        behaviour: Any = wrap_handler(handler, lambda context, proceed: proceed()).stream_stream

        async def serve(requests: AsyncIterator[Any], context: Context) -> Any:
            return await behaviour(self._commands(requests), FaultyContext(context, self._desk))

        return grpc.stream_stream_rpc_method_handler(
            serve, handler.request_deserializer, handler.response_serializer
        )

    async def _commands(self, requests: AsyncIterator[Any]) -> AsyncIterator[Any]:
        lane: Lane[session_pb2.OpenSessionRequest] = Lane(self._desk, "commands", _kinds_of_commands)
        async for message in requests:
            for each in lane.pass_on(message):
                yield each


def _refused() -> Exception:
    return Unavailable("lost on the way")


def _kinds_of_commands(message: session_pb2.OpenSessionRequest) -> Collection[str]:
    greeting = {"hello"} if message.HasField("hello") else set()
    return greeting | {str(command.WhichOneof("command")) for command in message.commands}


def _kinds_of_events(message: session_pb2.OpenSessionResponse) -> Collection[str]:
    greeting = {"welcome"} if message.HasField("welcome") else set()
    return greeting | {str(event.WhichOneof("event")) for event in message.events}


class FaultyContext:
    """A session's context: events out."""

    def __init__(self, context: Context, desk: FaultDesk) -> None:
        self._context = context
        self._events: Lane[session_pb2.OpenSessionResponse] = Lane(desk, "events", _kinds_of_events)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)

    async def write(self, message: session_pb2.OpenSessionResponse) -> None:
        """As grpc.aio's."""
        for each in self._events.pass_on(message):
            await self._context.write(each)
