"""Receives the services' spans over OTLP/gRPC, on this host only: the protocol has no keys."""

from __future__ import annotations

from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from gateway.web_page.traces import TraceRing
from meshkit.address import is_local
from meshkit.errors import InvalidArgument
from meshkit.rpc.handlers import Context
from meshkit.rpc.policy import Access, Role
from meshkit.rpc.server import RpcServer

SERVICE_NAME = "opentelemetry.proto.collector.trace.v1.TraceService"
MAX_EXPORT_BYTES = 4 * 1024 * 1024
FIELD = "page.traces_listen"
# A policy of its own: no listener of the mesh but this one takes spans, and this one takes nothing else.
_ACCESS = Access(everyone=Role.LOCAL, policy={f"/{SERVICE_NAME}/Export": frozenset({Role.LOCAL})})


class TraceReceiver(trace_service_pb2_grpc.TraceServiceServicer):
    """Puts what comes into `ring`.

    Raises:
        InvalidArgument: `listen` has no known form, or is beyond this host.
    """

    def __init__(self, listen: str, ring: TraceRing) -> None:
        if not is_local(listen):
            raise InvalidArgument(
                f"{FIELD} is {listen!r}; spans come without keys, so an address of this host is needed "
                "(127.0.0.1:PORT). For services on other hosts set tracing.endpoint of each to a collector",
                field=FIELD,
            )
        self._ring = ring
        self._server = RpcServer(listen=listen, max_message_bytes=MAX_EXPORT_BYTES, access=_ACCESS)
        self._server.add(trace_service_pb2_grpc.add_TraceServiceServicer_to_server, self, SERVICE_NAME)

    async def start(self) -> str:
        """Bind and serve; returns the bound address.

        Raises:
            FailedPrecondition: the address cannot be bound.
        """
        return await self._server.start()

    async def stop(self) -> None:
        """Stop listening."""
        await self._server.stop(0)

    async def Export(  # noqa: N802  # the RPC's name
        self, request: trace_service_pb2.ExportTraceServiceRequest, context: Context
    ) -> trace_service_pb2.ExportTraceServiceResponse:
        """See OpenTelemetry's TraceService."""
        self._ring.add(request.resource_spans)
        return trace_service_pb2.ExportTraceServiceResponse()
