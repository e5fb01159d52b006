"""Processor time of the tracing calls that one request makes in each service, and of encoding its spans.

In one process, with the services' own classes and a collector that takes all: what a mesh on a busy machine
cannot show for the noise of its neighbours.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from chipmesh.device.v1alpha1.execution_pb2 import PrefillChunk, StepPlan
from gateway.generation_spec import GenerationSpec, Placed, Sampling, StopConditions
from gateway.live_request import LiveRequest
from gateway.output_text import OutputText
from gateway.request_span import RequestSpan
from meshkit.config import TracingConfig
from meshkit.telemetry.tracing import configure_tracing, context_from_traceparent, inject_traceparent, tracer
from scheduler_svc.request_trace import RequestTrace
from worker_svc.request_spans import RequestSpans

STREAMS = 64
OUTPUT_TOKENS = 128
BATCH = 512
TRACE = "0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331"
PLACE = Placed(group="default", worker="worker-0", chip="hash", numeric_class="hash")
SAMPLING = Sampling(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0.0, seed=1)


class Keeper(SpanExporter):
    """Keeps spans, to be encoded afterwards."""

    def __init__(self) -> None:
        self.spans: list[ReadableSpan] = []

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See SpanExporter."""
        self.spans += spans
        return SpanExportResult.SUCCESS


class Unobserved:
    """An observer that is not interested."""

    def on_queued(self) -> None: ...
    def on_placed(self, placement: Placed) -> None: ...
    def on_tokens(self, count: int) -> None: ...
    def on_end(self, request: LiveRequest) -> None: ...


@dataclass(frozen=True)
class Cost:
    """Of one request, in microseconds of processor time. spans: that it made."""

    calls_us: float
    encoding_us: float
    spans: float

    @property
    def us(self) -> float:
        """All of it."""
        return self.calls_us + self.encoding_us


def _gateway(requests: int, flag: str) -> None:
    spec = GenerationSpec("request-1", "model", range(16), SAMPLING, StopConditions(OUTPUT_TOKENS), (0,))
    live = LiveRequest(spec, text=OutputText(None, stop_strings=()), observer=Unobserved())
    parent = context_from_traceparent(f"00-{TRACE}-{flag}")
    for _ in range(requests):
        with tracer().start_as_current_span("call", context=parent), RequestSpan() as span:
            inject_traceparent()
            span.accepted(spec, operation="chat")
            span.placed(PLACE)
            span.first_token()
            span.ended(live)


def _scheduler(requests: int, flag: str) -> None:
    parent = f"00-{TRACE}-01" if flag == "01" else ""
    for _ in range(requests):
        request = RequestTrace(parent, request_id="request-1", model="model", prompt_tokens=16)
        request.placed(group=PLACE.group, worker=PLACE.worker, chip=PLACE.chip, cached_tokens=0)
        request.finished("length", completion_tokens=OUTPUT_TOKENS)


def _executor(requests: int, flag: str) -> None:
    """`STREAMS` at once, in one prefill step and `OUTPUT_TOKENS` others."""
    spans = RequestSpans({"chipmesh.group": PLACE.group, "chipmesh.chip": PLACE.chip})
    slots = range(STREAMS)
    prefill = StepPlan(step_seq=1, prefill=[PrefillChunk(slot=slot, token_ids=range(16)) for slot in slots])
    for _ in range(requests // STREAMS):
        for slot in slots:
            spans.admit(slot, traceparent=f"00-{TRACE}-01" if flag == "01" else "", cached_tokens=0)
        spans.ran(prefill, slots, took_s=0.001)
        for number in range(2, OUTPUT_TOKENS + 1):
            spans.ran(StepPlan(step_seq=number), slots, took_s=0.001)
        for slot in slots:
            spans.release(slot)


PARTS: dict[str, Callable[[int, str], None]] = {
    "gateway": _gateway,
    "scheduler": _scheduler,
    "executor": _executor,
}


def measure_calls(*, traced: bool, requests: int = 10 * STREAMS) -> dict[str, Cost]:
    """By service, of a request that is sampled or one that is not."""
    return {name: _measure(part, "01" if traced else "00", requests) for name, part in PARTS.items()}


def _measure(part: Callable[[int, str], None], flag: str, requests: int) -> Cost:
    keeper = Keeper()
    tracing = configure_tracing("chipmesh-benchmark", TracingConfig(), exporter=keeper)
    try:
        part(STREAMS, flag)
        keeper.spans.clear()
        began = time.thread_time()
        part(requests, flag)
        calls_s = time.thread_time() - began
    finally:
        tracing.shutdown()
    began = time.thread_time()
    for start in range(0, len(keeper.spans), BATCH):
        encode_spans(keeper.spans[start : start + BATCH]).SerializeToString()
    encoding_s = time.thread_time() - began
    return Cost(calls_s / requests * 1e6, encoding_s / requests * 1e6, len(keeper.spans) / requests)
