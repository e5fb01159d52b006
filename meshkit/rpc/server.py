"""The gRPC server of a service: bound safely, with health always and reflection where allowed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any, TypeVar

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_health.v1._async import HealthServicer
from grpc_reflection.v1alpha import reflection

from meshkit.address import TcpAddress, UnixAddress, parse_listen
from meshkit.errors import FailedPrecondition
from meshkit.rpc.interceptors import ErrorMappingInterceptor, ServerTracingInterceptor
from meshkit.rpc.keepalive import DEFAULT_MAX_MESSAGE_BYTES, server_options
from meshkit.rpc.peers import PolicyInterceptor
from meshkit.rpc.policy import Access
from meshkit.telemetry.logging import get_logger

log = get_logger(__name__)

HEALTH_SERVICE = "grpc.health.v1.Health"

Servicer = TypeVar("Servicer")


class RpcServer:
    """One listening address and the services on it.

    listen: "HOST:PORT" (port 0 picks a free one) or "unix:PATH".
    reflection: offer server reflection for the services added.
    max_message_bytes: largest message in either direction.
    interceptors: run inside the standard ones, which trace calls, map errors and ask the policy.
    untraced_methods: full method names ("/package.Service/Method") that get no span.
    credentials: of meshkit.rpc.tls; None: plain text.
    access: who may call. By default each peer as its certificate says; without credentials all are local.

    Raises:
        InvalidArgument: `listen` has no known form.
    """

    def __init__(
        self,
        *,
        listen: str,
        reflection: bool = False,
        max_message_bytes: int = DEFAULT_MAX_MESSAGE_BYTES,
        interceptors: Sequence[grpc.aio.ServerInterceptor] = (),
        untraced_methods: Collection[str] = (),
        credentials: grpc.ServerCredentials | None = None,
        access: Access | None = None,
    ) -> None:
        self._listen = parse_listen(listen)
        self._reflection = reflection
        self._credentials = credentials
        self._service_names: list[str] = []
        self._health = HealthServicer()
        self._server = grpc.aio.server(
            interceptors=[
                ServerTracingInterceptor(excluded=untraced_methods),
                ErrorMappingInterceptor(),
                PolicyInterceptor(access or Access(), by_certificate=credentials is not None),
                *interceptors,
            ],
            options=server_options(max_message_bytes),
        )

    def __repr__(self) -> str:
        return f"<RpcServer {self._listen} services={self._service_names}>"

    def add(
        self,
        adder: Callable[[Servicer, grpc.aio.Server], Any],
        servicer: Servicer,
        service_full_name: str,
    ) -> None:
        """Add a service, before `start`: `add_XServicer_to_server`, its servicer, "package.Service"."""
        adder(servicer, self._server)
        self._service_names.append(service_full_name)

    async def start(self) -> str:
        """Bind and serve; returns the bound address ("HOST:PORT" or "unix:PATH").

        Health says NOT_SERVING until `set_serving(True)`.

        Raises:
            FailedPrecondition: the address cannot be bound, for instance because another process has it.
        """
        health_pb2_grpc.add_HealthServicer_to_server(self._health, self._server)
        await self.set_serving(False)
        if self._reflection:
            names = [*self._service_names, HEALTH_SERVICE, reflection.SERVICE_NAME]
            reflection.enable_server_reflection(names, self._server)
        address = await self._bind()
        await self._server.start()
        log.info("rpc server listens", address=address, services=self._service_names)
        return address

    async def _bind(self) -> str:
        if isinstance(self._listen, UnixAddress) and await _answers(self._listen):
            raise self._in_use()
        try:
            if self._credentials is None:
                port = self._server.add_insecure_port(str(self._listen))
            else:
                port = self._server.add_secure_port(str(self._listen), self._credentials)
        except RuntimeError as error:
            raise self._in_use() from error
        if isinstance(self._listen, TcpAddress):
            return str(TcpAddress(self._listen.host, port))
        return str(self._listen)

    def _in_use(self) -> FailedPrecondition:
        return FailedPrecondition(
            f"listen: {self._listen} cannot be bound; another process may have it. "
            "Free it, or give another address (port 0 picks a free one)",
            field="listen",
            reason="ADDRESS_IN_USE",
            address=self._listen,
        )

    async def set_serving(self, serving: bool) -> None:
        """Set the health of every service added and of the server as a whole ("")."""
        answer = health_pb2.HealthCheckResponse
        status = answer.SERVING if serving else answer.NOT_SERVING
        for name in ["", *self._service_names]:
            await self._health.set(name, status)

    async def stop(self, grace_s: float) -> None:
        """Turn health off, refuse new calls, wait up to `grace_s` seconds for running ones, abort the rest.

        It may return before the `finally` blocks of aborted handlers have run: wait on your own request
        table.
        """
        await self._health.enter_graceful_shutdown()
        await self._server.stop(grace_s)


async def _answers(address: UnixAddress) -> bool:
    """Whether a server listens there. gRPC replaces any socket file at its path, be it a live server's."""
    try:
        _, writer = await asyncio.open_unix_connection(address.path)
    except OSError:
        return False
    writer.close()
    await writer.wait_closed()
    return True
