"""Spans on their way out: never waited for, never more than so many, and none lost without being counted."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.trace import Tracer

from meshkit.telemetry.metrics import Metrics
from meshkit.telemetry.span_queue import SpanCounts, SpanQueue
from meshkit.telemetry.tracing import span_counts


class Gate(SpanExporter):
    """Takes spans while it is open. result: what it answers."""

    def __init__(self, *, is_open: bool = True, result: SpanExportResult = SpanExportResult.SUCCESS) -> None:
        self.opened = threading.Event()
        self.entered = threading.Event()
        self.result = result
        self.names: list[str] = []
        self.error: Exception | None = None
        if is_open:
            self.opened.set()

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """See SpanExporter."""
        self.entered.set()
        self.opened.wait(10)
        if self.error is not None:
            raise self.error
        if self.result is SpanExportResult.SUCCESS:
            self.names += [span.name for span in spans]
        return self.result

    def shutdown(self) -> None:
        """As OTLP's: a waiting export returns."""
        self.opened.set()


@contextmanager
def queue_of(exporter: Gate, counts: SpanCounts, **bounds: float) -> Iterator[tuple[Tracer, SpanQueue]]:
    queue = SpanQueue(exporter, counts=counts, **{"interval_s": 0.005, "flush_s": 0.1, **bounds})  # type: ignore[arg-type]
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(queue)
    yield provider.get_tracer("test"), queue
    provider.shutdown()


def test_spans_leave_in_order_and_the_last_ones_at_shutdown() -> None:
    exporter, counts = Gate(), SpanCounts()
    with queue_of(exporter, counts, interval_s=60, batch_spans=4) as (tracer, _):
        for number in range(10):
            tracer.start_span(str(number)).end()
    assert exporter.names == [str(number) for number in range(10)]
    assert counts.exported == 10
    assert not any(counts.dropped.values())


def test_a_collector_that_hangs_holds_up_nobody_and_what_finds_no_room_is_counted() -> None:
    exporter, counts = Gate(is_open=False), SpanCounts()
    with queue_of(exporter, counts, max_spans=8, batch_spans=4) as (tracer, _):
        tracer.start_span("first").end()
        assert exporter.entered.wait(5)
        began = time.monotonic()
        for number in range(100):
            tracer.start_span(str(number)).end()
        assert time.monotonic() - began < 1
        assert counts.dropped["queue_full"] == 92
        exporter.opened.set()
    assert exporter.names == ["first", *(str(number) for number in range(8))]
    assert counts.exported == 9


@pytest.mark.parametrize("error", [None, RuntimeError("no such host")])
def test_a_failed_export_loses_its_batch_and_the_next_ones_go_on(error: Exception | None) -> None:
    exporter, counts = Gate(result=SpanExportResult.FAILURE), SpanCounts()
    exporter.error = error
    with queue_of(exporter, counts, interval_s=60) as (tracer, queue):
        tracer.start_span("lost").end()
        queue.force_flush()
        exporter.result, exporter.error = SpanExportResult.SUCCESS, None
        tracer.start_span("kept").end()
    assert exporter.names == ["kept"]
    assert (counts.exported, counts.dropped["export_failed"]) == (1, 1)


def test_shutdown_gives_up_on_a_collector_that_hangs_and_counts_what_is_left() -> None:
    exporter, counts = Gate(is_open=False, result=SpanExportResult.FAILURE), SpanCounts()
    began = time.monotonic()
    with queue_of(exporter, counts, batch_spans=2) as (tracer, _):
        for _ in range(7):
            tracer.start_span("span").end()
    tracer.start_span("late").end()
    assert time.monotonic() - began < 2
    assert counts.exported == 0
    assert sum(counts.dropped.values()) == 8


def test_every_service_shows_what_became_of_its_spans_from_the_start() -> None:
    text = Metrics().expose().decode()
    assert f"chipmesh_spans_exported_total {float(span_counts().exported)}" in text
    for reason in ("queue_full", "export_failed", "shutdown"):
        assert f'chipmesh_spans_dropped_total{{reason="{reason}"}}' in text
