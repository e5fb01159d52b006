"""A small OTLP collector over real gRPC that keeps the spans it is sent."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc


@dataclass(frozen=True)
class SeenSpan:
    """One span as exported. status: its description where it ended badly, else "". links: trace ids."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str
    ended: bool
    status: str = ""
    links: tuple[str, ...] = ()
    events: tuple[str, ...] = ()
    attributes: Mapping[str, Any] = field(default_factory=dict)


class OtlpSink(trace_service_pb2_grpc.TraceServiceServicer):
    """Collects spans; `wait_for` blocks on arrivals, not on time."""

    def __init__(self) -> None:
        self._spans: list[SeenSpan] = []
        self._arrived = threading.Condition()

    def Export(self, request: Any, context: grpc.ServicerContext) -> Any:
        seen = [
            SeenSpan(
                service=_service(resource),
                name=span.name,
                trace_id=span.trace_id.hex(),
                span_id=span.span_id.hex(),
                parent_id=span.parent_span_id.hex(),
                ended=span.end_time_unix_nano >= span.start_time_unix_nano > 0,
                status=span.status.message,
                links=tuple(link.trace_id.hex() for link in span.links),
                events=tuple(event.name for event in span.events),
                attributes={item.key: _value(item.value) for item in span.attributes},
            )
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]
        with self._arrived:
            self._spans.extend(seen)
            self._arrived.notify_all()
        return trace_service_pb2.ExportTraceServiceResponse()

    def wait_for(
        self, condition: Callable[[list[SeenSpan]], bool], *, timeout_s: float = 30.0
    ) -> list[SeenSpan]:
        """The spans so far, once they satisfy `condition`; AssertionError after `timeout_s`."""
        with self._arrived:
            if not self._arrived.wait_for(lambda: condition(self._spans), timeout=timeout_s):
                names = sorted({(span.service, span.name) for span in self._spans})
                raise AssertionError(f"the spans waited for did not come within {timeout_s} s; seen: {names}")
            return list(self._spans)


def _value(value: Any) -> Any:
    kind = value.WhichOneof("value")
    return (
        [_value(item) for item in value.array_value.values] if kind == "array_value" else getattr(value, kind)
    )


def _service(resource: Any) -> str:
    values: dict[str, str] = {item.key: item.value.string_value for item in resource.resource.attributes}
    return values.get("service.name", "")


@contextmanager
def otlp_sink() -> Iterator[tuple[OtlpSink, str]]:
    """A running sink and its endpoint, "http://127.0.0.1:PORT"."""
    sink = OtlpSink()
    server = grpc.server(futures.ThreadPoolExecutor(max_workers=2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(sink, server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    try:
        yield sink, f"http://127.0.0.1:{port}"
    finally:
        server.stop(grace=None).wait()
