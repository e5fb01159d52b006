"""The spans of one request: `chipmesh.scheduler.request`, and in turn below it `queue` and `placement`, once
for each replica that it runs on; ended on every path.
"""

from __future__ import annotations

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Span, Status, StatusCode

from meshkit.telemetry.tracing import context_from_traceparent, inject_traceparent, tracer

LOST = "LOST"
_CANCELLED = "cancelled"


class RequestTrace:
    """Begins in the queue. `request_id` is the client's; `parent` is what the gateway sent, "" for a request
    that is not traced: then nothing is made and nothing costs anything.

    `traceparent` is for the executor, "" where not traced: the present placement's. That span is ours and
    ends here, whatever becomes of the executor, so what an executor has exported never lacks its parent.
    """

    __slots__ = ("_context", "_part", "_placements", "_span", "request_id", "traceparent")

    def __init__(self, parent: str, *, request_id: str, model: str, prompt_tokens: int) -> None:
        self.request_id = request_id
        self.traceparent = ""
        self._span: Span | None = None
        self._part: Span | None = None
        self._context = context_from_traceparent(parent)
        self._placements = 0
        if not trace.get_current_span(self._context).get_span_context().trace_flags.sampled:
            return
        self._span = tracer().start_span(
            "chipmesh.scheduler.request",
            context=self._context,
            attributes={
                "chipmesh.request_id": request_id,
                "gen_ai.request.model": model,
                "gen_ai.usage.input_tokens": prompt_tokens,
            },
        )
        self._context = trace.set_span_in_context(self._span, Context())
        self._begin("queue")

    def placed(self, *, group: str, worker: str, chip: str, cached_tokens: int) -> None:
        """The request entered a slot: the first, another, or its own again."""
        if self._span is None:
            return
        self._end_part()
        self._placements += 1
        part = self._begin("placement")
        part.set_attributes(
            {
                "chipmesh.group": group,
                "chipmesh.worker": worker,
                "chipmesh.chip": chip,
                "chipmesh.placement": self._placements,
                "gen_ai.usage.cache_read.input_tokens": cached_tokens,
            }
        )
        self.traceparent = inject_traceparent(trace.set_span_in_context(part, Context()))

    def moves(self, *, lost: bool, output_tokens: int) -> None:
        """Its replica is gone, and it waits again. lost: unlooked-for. output_tokens: that it has so far."""
        if self._span is None:
            return
        if self._part is not None and lost:
            self._part.set_status(Status(StatusCode.ERROR, LOST))
        self._end_part()
        self._span.add_event("moved", {"chipmesh.lost": lost, "gen_ai.usage.output_tokens": output_tokens})
        self._begin("queue")

    def finished(self, reason: str, *, completion_tokens: int) -> None:
        """The request ended well, or was cancelled. Last call."""
        if self._span is None:
            return
        self._span.set_attributes(
            {"gen_ai.response.finish_reasons": [reason], "gen_ai.usage.output_tokens": completion_tokens}
        )
        self._end("CANCELLED" if reason == _CANCELLED else "")

    def failed(self, code: str, reason: str) -> None:
        """The request ended badly. Last call."""
        if self._span is None:
            return
        self._span.set_attributes({"error.type": code, "chipmesh.error_reason": reason})
        self._end(f"{code}: {reason}")

    def _begin(self, name: str) -> Span:
        part = self._part = tracer().start_span(name, context=self._context)
        return part

    def _end_part(self) -> None:
        if self._part is not None:
            self._part.end()
            self._part = None

    def _end(self, error: str) -> None:
        if error:
            for span in (self._part, self._span):
                if span is not None:
                    span.set_status(Status(StatusCode.ERROR, error))
        self._end_part()
        if self._span is not None:
            self._span.end()
