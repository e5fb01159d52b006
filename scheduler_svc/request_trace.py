"""The spans of one request: `chipmesh.scheduler.request` and, below it, `queue`; ended on every path."""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode

from meshkit.telemetry.tracing import context_from_traceparent, inject_traceparent, tracer


class RequestTrace:
    """Begins in the queue. `request_id` is the client's. `traceparent` is the request span's, for the
    executor; empty where not sampled.
    """

    __slots__ = ("_context", "_queue", "_span", "request_id", "traceparent")

    def __init__(self, parent: str, *, request_id: str, model: str, prompt_tokens: int) -> None:
        self.request_id = request_id
        self._span = tracer().start_span(
            "chipmesh.scheduler.request",
            context=context_from_traceparent(parent),
            attributes={
                "chipmesh.request_id": request_id,
                "chipmesh.model": model,
                "chipmesh.prompt_tokens": prompt_tokens,
            },
        )
        self._context = trace.set_span_in_context(self._span, Context())
        self.traceparent = inject_traceparent(self._context)
        self._queue: Span | None = None
        self.queued()

    def queued(self) -> None:
        """The request waits for a slot, at first or again. Does nothing if it waits already."""
        if self._queue is None:
            self._queue = tracer().start_span("queue", context=self._context)

    def placed(self, *, group: str, worker: str, chip: str, cached_tokens: int) -> None:
        """The request entered a slot."""
        attributes = {"chipmesh.group": group, "chipmesh.worker": worker, "chipmesh.chip": chip}
        self._end_queue()
        self._span.set_attributes({**attributes, "chipmesh.cached_tokens": cached_tokens})

    def finished(self, reason: str, *, completion_tokens: int) -> None:
        """The request ended well. Last call."""
        self._span.set_attributes(
            {"chipmesh.finish_reason": reason, "chipmesh.completion_tokens": completion_tokens}
        )
        self._end()

    def failed(self, code: str, reason: str) -> None:
        """The request ended badly. Last call."""
        self._span.set_attribute("chipmesh.error_reason", reason)
        self._span.set_status(Status(StatusCode.ERROR, f"{code}: {reason}"))
        self._end()

    def _end_queue(self) -> None:
        if self._queue is not None:
            self._queue.end()
            self._queue = None

    def _end(self) -> None:
        self._end_queue()
        self._span.end()
