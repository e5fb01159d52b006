"""Spans leave over OTLP: a small collector in this process receives what the service sends."""

from __future__ import annotations

import asyncio
import socket
import time
from typing import Any

import grpc.aio
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from meshkit.config import TracingConfig
from meshkit.telemetry.tracing import configure_tracing, span_counts, tracer

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


@pytest.mark.parametrize("listens", [False, True], ids=["away", "hangs"])
async def test_a_collector_that_is_away_costs_counted_spans_and_a_second_at_the_end(listens: bool) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))
        if listens:  # It takes connections and never says a word.
            silent.listen()
        endpoint = f"http://127.0.0.1:{silent.getsockname()[1]}"
        before = sum(span_counts().dropped.values())
        handle = configure_tracing("gateway", TracingConfig(exporter="otlp", endpoint=endpoint))
        began = time.monotonic()
        for _ in range(1000):
            tracer().start_span("request").end()
        made = time.monotonic()
        await asyncio.to_thread(handle.shutdown)
    assert made - began < 1, "nobody waits for a collector"
    assert time.monotonic() - made < 4
    assert sum(span_counts().dropped.values()) - before == 1000


async def test_sending_spans_makes_none() -> None:
    collector = Collector()
    server = grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    handle = configure_tracing("gateway", TracingConfig(exporter="otlp", endpoint=f"http://127.0.0.1:{port}"))
    for _ in range(3):
        with tracer().start_as_current_span("request"):
            await asyncio.to_thread(handle.flush)
    await asyncio.to_thread(handle.shutdown)
    await server.stop(0)
    assert collector.received == [("gateway", "request")] * 3
