"""Spans of the traced requests in an executor's slots; a request without a trace costs nothing here.

While a request runs only times are noted; its spans are made when it leaves, parent before children. So
no span of an executor that is killed lacks its parent, and the scheduler's `placement`, the parent of
all, tells what became of the request.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Link, Span, SpanContext, Status, StatusCode

from chipmesh.device.v1alpha1.execution_pb2 import StepPlan
from meshkit.telemetry.tracing import context_from_traceparent, tracer

REQUEST_SPAN = "chipmesh.executor.request"
STEP_SPAN = "chipmesh.executor.step"
MAX_CHUNK_EVENTS = 64
"""Of a prefill; a prompt of more chunks has the first ones, and its counts are right."""
MAX_STEP_LINKS = 32


@dataclass(slots=True)
class _Traced:
    """What is noted of one request; times in nanoseconds since the epoch."""

    parent: Context
    link: SpanContext
    cached_tokens: int
    admitted_ns: int
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    """(end, tokens, step_seq) of each prompt chunk."""
    marks: list[tuple[int, int, int]] = field(default_factory=list)
    """(time, output tokens, step_seq) at the 1st, 2nd, 4th, 8th … token: a rate over time, at no price."""
    prompt_tokens: int = 0
    chunk_count: int = 0
    output_tokens: int = 0
    first_token_ns: int | None = None


class RequestSpans:
    """One span per traced request from admission to release, with children `prefill` and `decode`; and spans
    of the steps that did something for it that is noted, which link to it.

    attributes: put on every request and step span (model, group, worker, chip).
    clock_ns: time since the epoch, as spans have it.
    """

    def __init__(self, attributes: Mapping[str, str], *, clock_ns: Callable[[], int] = time.time_ns) -> None:
        self._attributes = dict(attributes)
        self._clock_ns = clock_ns
        self._traced: dict[int, _Traced] = {}

    def __len__(self) -> int:
        return len(self._traced)

    def admit(self, slot: int, *, traceparent: str, cached_tokens: int) -> None:
        """A request enters a slot; nothing happens where `traceparent` is empty, malformed or not sampled."""
        if not traceparent:
            return
        parent = context_from_traceparent(traceparent)
        link = trace.get_current_span(parent).get_span_context()
        if link.is_valid and link.trace_flags.sampled:
            self._traced[slot] = _Traced(parent, link, cached_tokens, self._clock_ns())

    def ran(self, plan: StepPlan, slots: Sequence[int], *, took_s: float) -> None:
        """A step has ended. slots: that made a token each. took_s: seconds of the step."""
        if not self._traced:
            return
        now = self._clock_ns()
        noted = [*self._note_chunks(plan, now), *self._note_tokens(slots, now, plan.step_seq)]
        if noted:
            self._step_span(plan, len(slots), noted, now, took_s)

    def release(self, slot: int) -> None:
        """A request leaves its slot."""
        traced = self._traced.pop(slot, None)
        if traced is not None:
            self._make_spans(slot, traced, "")

    def end_all(self, cause: str) -> None:
        """The slots were dropped, or nobody is there to release them. cause: the status of their spans."""
        for slot in list(self._traced):
            self._make_spans(slot, self._traced.pop(slot), cause)

    def _note_chunks(self, plan: StepPlan, now: int) -> Iterable[_Traced]:
        for chunk in plan.prefill:
            traced = self._traced.get(chunk.slot)
            if traced is None:
                continue
            tokens = len(chunk.token_ids)
            traced.prompt_tokens += tokens
            traced.chunk_count += 1
            if traced.chunk_count <= MAX_CHUNK_EVENTS:
                traced.chunks.append((now, tokens, plan.step_seq))
                yield traced

    def _note_tokens(self, slots: Iterable[int], now: int, step_seq: int) -> Iterable[_Traced]:
        for slot in slots:
            traced = self._traced.get(slot)
            if traced is None:
                continue
            traced.output_tokens += 1
            count = traced.output_tokens
            if traced.first_token_ns is None:
                traced.first_token_ns = now  # Its prefill's chunk has the step's link already.
            elif count & (count - 1) == 0:
                traced.marks.append((now, count, step_seq))
                yield traced

    def _step_span(
        self, plan: StepPlan, made: int, noted: Sequence[_Traced], now: int, took_s: float
    ) -> None:
        span = tracer().start_span(
            STEP_SPAN,
            context=Context(),
            links=[Link(traced.link) for traced in noted[:MAX_STEP_LINKS]],
            start_time=now - int(took_s * 1e9),
            attributes={
                **self._attributes,
                "chipmesh.epoch": plan.epoch,
                "chipmesh.step_seq": plan.step_seq,
                "chipmesh.step.prefill_requests": len(plan.prefill),
                "chipmesh.step.prefill_tokens": sum(len(chunk.token_ids) for chunk in plan.prefill),
                "chipmesh.step.output_tokens": made,
            },
        )
        span.end(end_time=now)

    def _make_spans(self, slot: int, traced: _Traced, cause: str) -> None:
        now = self._clock_ns()
        request = tracer().start_span(
            REQUEST_SPAN,
            context=traced.parent,
            start_time=traced.admitted_ns,
            attributes={
                **self._attributes,
                "chipmesh.slot": slot,
                "gen_ai.usage.cache_read.input_tokens": traced.cached_tokens,
                "gen_ai.usage.output_tokens": traced.output_tokens,
            },
        )
        _end(request, now, cause)
        first_token_ns = traced.first_token_ns
        self._make_prefill(request, traced, now if first_token_ns is None else first_token_ns, cause)
        if first_token_ns is not None:
            _make_decode(request, traced, first_token_ns, now, cause)

    def _make_prefill(self, request: Span, traced: _Traced, end_ns: int, cause: str) -> None:
        span = tracer().start_span(
            "prefill",
            context=trace.set_span_in_context(request, Context()),
            start_time=traced.admitted_ns,
            attributes={
                "chipmesh.prefill.tokens": traced.prompt_tokens,
                "chipmesh.prefill.chunks": traced.chunk_count,
            },
        )
        for at, tokens, step_seq in traced.chunks:
            span.add_event("chunk", {"chipmesh.tokens": tokens, "chipmesh.step_seq": step_seq}, at)
        _end(span, end_ns, cause if traced.first_token_ns is None else "")


def _make_decode(request: Span, traced: _Traced, start_ns: int, end_ns: int, cause: str) -> None:
    span = tracer().start_span(
        "decode",
        context=trace.set_span_in_context(request, Context()),
        start_time=start_ns,
        attributes={"gen_ai.usage.output_tokens": traced.output_tokens},
    )
    for at, count, step_seq in traced.marks:
        span.add_event("tokens", {"gen_ai.usage.output_tokens": count, "chipmesh.step_seq": step_seq}, at)
    _end(span, end_ns, cause)


def _end(span: Span, at_ns: int, cause: str) -> None:
    if cause:
        span.set_status(Status(StatusCode.ERROR, cause))
    span.end(end_time=at_ns)
