"""Traces: set-up of one service's exporter, and the trace context as text that travels in messages."""

from __future__ import annotations

from collections.abc import Mapping

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import Tracer
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from meshkit.config import TracingConfig

_PROPAGATOR = TraceContextTextMapPropagator()
_NO_TRACER: Tracer = trace.NoOpTracer()
# Spans about looking at a service or about sending spans would drown the requests, or feed on themselves.
_UNTRACED_PREFIXES = ("/grpc.health.", "/grpc.reflection.", "/opentelemetry.proto.collector.")


class TracingHandle:
    """What `configure_tracing` gives back; `shutdown` sends what is left and turns tracing off."""

    def __init__(self, provider: TracerProvider | None) -> None:
        self._provider = provider

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


def configure_tracing(
    service_name: str, config: TracingConfig, *, exporter: SpanExporter | None = None
) -> TracingHandle:
    """Set up this process' tracing; call it once, in the composition root.

    exporter: takes the place of the configured one, and gets each span as it ends (for tests).
    """
    processor = _processor(config, exporter)
    if processor is None:
        return TracingHandle(None)
    provider = TracerProvider(
        resource=Resource.create({"service.name": service_name}),
        sampler=ParentBased(TraceIdRatioBased(config.sampling_ratio)),
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

        return BatchSpanProcessor(OTLPSpanExporter(endpoint=config.endpoint, insecure=True))
    return None


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
