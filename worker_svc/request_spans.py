"""Spans of the traced requests in an executor's slots; a request without a trace costs nothing here."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from opentelemetry import trace
from opentelemetry.trace import Span

from meshkit.telemetry.tracing import context_from_traceparent, tracer

REQUEST_SPAN = "chipmesh.executor.request"


@dataclass(slots=True)
class _Traced:
    request: Span
    phase: Span
    decoding: bool = False
    output_tokens: int = 0


class RequestSpans:
    """One span per traced request from admission to release, with children `prefill` and `decode`.

    attributes: put on every request span (model, group, worker, chip).
    """

    def __init__(self, attributes: Mapping[str, str]) -> None:
        self._attributes = dict(attributes)
        self._traced: dict[int, _Traced] = {}

    def __len__(self) -> int:
        return len(self._traced)

    def admit(self, slot: int, *, traceparent: str, cached_tokens: int) -> None:
        """A request enters a slot; nothing happens where `traceparent` is empty or malformed."""
        if not traceparent:
            return
        parent = context_from_traceparent(traceparent)
        if not trace.get_current_span(parent).get_span_context().is_valid:
            return
        request = tracer().start_span(REQUEST_SPAN, context=parent, attributes=self._attributes)
        request.set_attribute("chipmesh.slot", slot)
        request.set_attribute("chipmesh.cached_tokens", cached_tokens)
        self._traced[slot] = _Traced(request, _start_child(request, "prefill"))

    def sampled(self, slots: Iterable[int]) -> None:
        """These slots made a token each; the first one of a request ends its prefill."""
        if not self._traced:
            return
        for slot in slots:
            traced = self._traced.get(slot)
            if traced is None:
                continue
            traced.output_tokens += 1
            if not traced.decoding:
                traced.decoding = True
                traced.phase.end()
                traced.phase = _start_child(traced.request, "decode")

    def release(self, slot: int) -> None:
        """A request leaves its slot."""
        traced = self._traced.pop(slot, None)
        if traced is None:
            return
        traced.phase.end()
        traced.request.set_attribute("chipmesh.output_tokens", traced.output_tokens)
        traced.request.end()

    def end_all(self) -> None:
        """The slots were dropped, or nobody is there to release them."""
        for slot in list(self._traced):
            self.release(slot)


def _start_child(request: Span, name: str) -> Span:
    return tracer().start_span(name, context=trace.set_span_in_context(request))
