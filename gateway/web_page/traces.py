"""Recent traces of requests: a ring of bounded size, filled with spans in whatever order they come."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from opentelemetry.proto.common.v1.common_pb2 import AnyValue, KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import ResourceSpans, Status
from opentelemetry.proto.trace.v1.trace_pb2 import Span as OtlpSpan

from gateway.web_page.feed import Feed

MAX_SPANS_PER_TRACE = 512
MAX_EVENTS = 64
MAX_ATTRIBUTES = 32
MAX_TEXT_CHARS = 200
_NS_PER_S = 1e9


@dataclass
class _Trace:
    """spans: as the page reads them. root: the first by which it entered, else the earliest one so far."""

    trace_id: str
    spans: list[dict[str, Any]] = field(default_factory=list)
    begin_ns: int = 0
    end_ns: int = 0
    services: set[str] = field(default_factory=set)
    root: dict[str, Any] | None = None
    error: str = ""
    left_out: int = 0


class TraceRing:
    """The last `max_traces` traces, of `max_spans` spans together; the oldest go first."""

    def __init__(self, *, max_traces: int, max_spans: int, feed: Feed | None = None) -> None:
        self.feed = feed or Feed()
        self.span_count = 0
        self._max_traces = max_traces
        self._max_spans = max_spans
        self._traces: OrderedDict[str, _Trace] = OrderedDict()

    def __repr__(self) -> str:
        return f"<TraceRing {len(self._traces)} traces, {self.span_count} spans>"

    def add(self, resources: Iterable[ResourceSpans]) -> None:
        """Spans of one export."""
        for resource in resources:
            service = _attributes(resource.resource.attributes).get("service.name", "")
            for scope in resource.scope_spans:
                for span in scope.spans:
                    if not _is_step(span):
                        self._add(span, str(service))
        self._evict()
        self.feed.bump()

    def list(self) -> list[dict[str, Any]]:
        """A line for each trace, the newest first."""
        ordered = sorted(self._traces.values(), key=lambda trace: trace.begin_ns, reverse=True)
        return [_summary(trace) for trace in ordered]

    def get(self, trace_id: str) -> dict[str, Any] | None:
        """One trace with its spans, in the order of their begin; None where it is not (or no longer) here."""
        trace = self._traces.get(trace_id)
        if trace is None:
            return None
        spans = sorted(trace.spans, key=lambda span: (span["begin_s"], -span["duration_s"]))
        begin_s = trace.begin_ns / _NS_PER_S
        return {
            **_summary(trace),
            "left_out": trace.left_out,
            "spans": [{**span, "begin_s": span["begin_s"] - begin_s} for span in spans],
        }

    def _add(self, span: OtlpSpan, service: str) -> None:
        trace_id = span.trace_id.hex()
        trace = self._traces.setdefault(trace_id, _Trace(trace_id))
        if len(trace.spans) >= MAX_SPANS_PER_TRACE:
            trace.left_out += 1
            return
        described = _describe(span, service)
        trace.spans.append(described)
        self.span_count += 1
        begin_ns, end_ns = span.start_time_unix_nano, span.end_time_unix_nano
        trace.begin_ns = min(trace.begin_ns or begin_ns, begin_ns)
        trace.end_ns = max(trace.end_ns, end_ns)
        trace.services.add(service)
        if trace.root is None or _rank(described) < _rank(trace.root):
            trace.root = described
        if described["error"] and not trace.error:
            trace.error = described["error"]

    def _evict(self) -> None:
        while len(self._traces) > self._max_traces or self.span_count > self._max_spans:
            _, oldest = self._traces.popitem(last=False)
            self.span_count -= len(oldest.spans)


def _is_step(span: OtlpSpan) -> bool:
    """A step serves many requests and links to theirs: a trace of its own, of which there are thousands."""
    return bool(span.links) and not span.parent_span_id


def _is_entry(span: dict[str, Any]) -> bool:
    """Where a trace begins, or enters the mesh from a client that has a trace of its own."""
    return not span["parent_id"] or span["kind"] == "server"


def _rank(span: dict[str, Any]) -> tuple[bool, float]:
    return (not _is_entry(span), span["begin_s"])


def _summary(trace: _Trace) -> dict[str, Any]:
    return {
        "trace_id": trace.trace_id,
        "name": trace.root["name"] if trace.root else "",
        "service": trace.root["service"] if trace.root else "",
        "is_under_way": trace.root is None or not _is_entry(trace.root),
        "begin_unix_s": trace.begin_ns / _NS_PER_S,
        "duration_s": max(trace.end_ns - trace.begin_ns, 0) / _NS_PER_S,
        "span_count": len(trace.spans),
        "services": sorted(trace.services),
        "error": trace.error,
    }


def _describe(span: OtlpSpan, service: str) -> dict[str, Any]:
    begin_ns = span.start_time_unix_nano
    failed = span.status.code == Status.STATUS_CODE_ERROR
    return {
        "span_id": span.span_id.hex(),
        "parent_id": span.parent_span_id.hex(),
        "name": span.name[:MAX_TEXT_CHARS],
        "kind": OtlpSpan.SpanKind.Name(span.kind).removeprefix("SPAN_KIND_").lower(),
        "service": service,
        "begin_s": begin_ns / _NS_PER_S,
        "duration_s": max(span.end_time_unix_nano - begin_ns, 0) / _NS_PER_S,
        "error": (span.status.message[:MAX_TEXT_CHARS] or "error") if failed else "",
        "attributes": _attributes(span.attributes),
        "events": [
            {
                "name": event.name[:MAX_TEXT_CHARS],
                "at_s": (event.time_unix_nano - begin_ns) / _NS_PER_S,
                "attributes": _attributes(event.attributes),
            }
            for event in span.events[:MAX_EVENTS]
        ],
    }


def _attributes(pairs: Iterable[KeyValue]) -> dict[str, Any]:
    kept = list(pairs)[:MAX_ATTRIBUTES]
    return {pair.key[:MAX_TEXT_CHARS]: _plain(pair.value) for pair in kept}


def _plain(value: AnyValue) -> str | bool | int | float:
    kind = value.WhichOneof("value")
    if kind in ("bool_value", "int_value", "double_value"):
        plain: bool | int | float = getattr(value, kind)
        return plain
    if kind == "array_value":
        return ", ".join(str(_plain(each)) for each in value.array_value.values)[:MAX_TEXT_CHARS]
    return str(getattr(value, kind))[:MAX_TEXT_CHARS] if kind else ""
