"""Spans leave over OTLP: a small collector in this process receives what the service sends."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from meshkit.config import TracingConfig
from meshkit.telemetry.tracing import configure_tracing, tracer

# One loop for all of them: grpc.aio keeps one poller per process, and its late events hit closed loops.
pytestmark = pytest.mark.asyncio(loop_scope="session")


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """Keeps the names of the spans it is sent, with their service."""

    def __init__(self) -> None:
        self.received: list[tuple[str, str]] = []

    async def Export(self, request: Any, context: Any) -> Any:
        for resource in request.resource_spans:
            attributes = {one.key: one.value.string_value for one in resource.resource.attributes}
            for scope in resource.scope_spans:
                self.received += [(attributes["service.name"], span.name) for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


async def test_spans_reach_the_configured_endpoint_by_shutdown_at_the_latest() -> None:
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    handle = configure_tracing("gateway", TracingConfig(exporter="otlp", endpoint=f"http://127.0.0.1:{port}"))
    tracer().start_span("request").end()
    await asyncio.to_thread(handle.shutdown)
    await server.stop(0)
    assert collector.received == [("gateway", "request")]
