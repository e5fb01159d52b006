"""Traces: set-up of one service's exporter, and the trace context as text that travels in messages."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter
from opentelemetry.trace import Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from meshkit.config import TracingConfig
from meshkit.telemetry.sampling import request_sampler
from meshkit.telemetry.span_queue import SpanCounts, SpanQueue

_PROPAGATOR = TraceContextTextMapPropagator()
_NO_TRACER: Tracer = trace.NoOpTracer()
# Spans about looking at a service or about sending spans would drown the requests, or feed on themselves.
_UNTRACED_PREFIXES = ("/grpc.health.", "/grpc.reflection.", "/opentelemetry.proto.collector.")


EXPORT_TIMEOUT_S = 5.0
LAST_EXPORT_TIMEOUT_S = 0.7
"""Less than the exporter waits before it tries again, so that it does not."""


class TracingHandle:
    """What `configure_tracing` gives back; `shutdown` sends what is left and turns tracing off."""

    def __init__(self, provider: TracerProvider | None) -> None:
        self._provider = provider

    def flush(self) -> None:
        """Send what has ended so far, on the caller's thread."""
        if self._provider is not None:
            self._provider.force_flush()

    def shutdown(self) -> None:
        """Flush and end the exporter. May block for its timeout: call it at the very end or in a thread."""
        if self._provider is None:
            return
        if _Current.provider is self._provider:
            _Current.provider, _Current.tracer = None, _NO_TRACER
        self._provider.shutdown()
        self._provider = None


class _Current:
    """The process' provider. OpenTelemetry's own global can be set only once, too few for tests."""

    provider: TracerProvider | None = None
    tracer: Tracer = _NO_TRACER
    counts = SpanCounts()


def configure_tracing(
    service_name: str,
    config: TracingConfig,
    *,
    exporter: SpanExporter | None = None,
    bounds_callers: bool = False,
) -> TracingHandle:
    """Set up this process' tracing; call it once, in the composition root.

    bounds_callers: `max_traces_per_s` holds for callers that ask for their trace to be kept, too.
    exporter: takes the place of the configured one, and gets each span as it ends (for tests).
    """
    processor = _processor(config, exporter)
    if processor is None:
        return TracingHandle(None)
    provider = TracerProvider(
        resource=Resource.create({"service.name": service_name}),
        sampler=request_sampler(
            config.sampling_ratio, max_per_s=config.max_traces_per_s, bounds_callers=bounds_callers
        ),
        shutdown_on_exit=False,
    )
    provider.add_span_processor(processor)
    _Current.provider, _Current.tracer = provider, provider.get_tracer("chipmesh")
    return TracingHandle(provider)


def _processor(config: TracingConfig, exporter: SpanExporter | None) -> SpanProcessor | None:
    if exporter is not None:
        return SimpleSpanProcessor(exporter)
    if config.exporter == "otlp":
        # Imported here since it doubles the import time of every service, and most run without it.
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter  # noqa: PLC0415

        def open_exporter(timeout_s: float) -> SpanExporter:
            return OTLPSpanExporter(endpoint=config.endpoint, insecure=True, timeout=timeout_s)

        return SpanQueue(
            open_exporter(EXPORT_TIMEOUT_S),
            counts=_Current.counts,
            last_exporter=lambda: open_exporter(LAST_EXPORT_TIMEOUT_S),
        )
    return None


def span_counts() -> SpanCounts:
    """What became of this process' spans so far."""
    return _Current.counts


def tracer() -> Tracer:
    """The process' tracer; where tracing is off, its spans cost nothing and keep their parent's context."""
    return _Current.tracer


def inject_traceparent(context: Context | None = None) -> str:
    """W3C traceparent of `context` (default: the current one), or "" where nothing sampled is there."""
    span = trace.get_current_span(context).get_span_context()
    if not span.is_valid or not span.trace_flags.sampled:
        return ""
    carrier: dict[str, str] = {}
    _PROPAGATOR.inject(carrier, context)
    return carrier["traceparent"]


def context_from_traceparent(traceparent: str) -> Context:
    """The context that a traceparent names; an empty one for "" or malformed text, never the current."""
    carrier: Mapping[str, str] = {"traceparent": traceparent} if traceparent else {}
    return _PROPAGATOR.extract(carrier, context=Context())


def is_traced_method(method: str) -> bool:
    """False for health checks, reflection and span export. `method`: "/package.Service/Method"."""
    return not method.startswith(_UNTRACED_PREFIXES)
