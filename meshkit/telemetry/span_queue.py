"""Spans on their way out: a bounded queue and a thread that empties it. Nobody waits for the collector."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from opentelemetry.context import Context
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

from meshkit.telemetry.logging import get_logger

log = get_logger(__name__)

QUEUE_FULL, EXPORT_FAILED, SHUTDOWN = "queue_full", "export_failed", "shutdown"


@dataclass
class SpanCounts:
    """What became of the spans of this process. dropped: by reason."""

    exported: int = 0
    dropped: dict[str, int] = field(default_factory=lambda: {QUEUE_FULL: 0, EXPORT_FAILED: 0, SHUTDOWN: 0})


class SpanQueue(SpanProcessor):
    """Takes ended spans in order and hands them to `exporter` in batches, on a thread of its own.

    max_spans: that may wait; those that find it full are dropped and counted, so that a collector that is
        away or slow costs memory and time of a known size.
    batch_spans: to an export. interval_s: between two looks.
    flush_s: what `shutdown` takes at most, beside ending the exporter.
    last_exporter: makes the one that sends what is left at the end, and should try but once: where a whole
        mesh stops, the collector may have gone before; None: `exporter` does.

    Our own, since the SDK's processor drops the oldest spans (the parents of what comes), counts them only
    for its own meter, and writes a log line for each on the thread that made it.
    """

    def __init__(
        self,
        exporter: SpanExporter,
        *,
        counts: SpanCounts,
        max_spans: int = 8192,
        batch_spans: int = 512,
        interval_s: float = 1.0,
        flush_s: float = 1.0,
        last_exporter: Callable[[], SpanExporter] | None = None,
    ) -> None:
        self._exporter = exporter
        self._counts = counts
        self._max_spans = max_spans
        self._batch_spans = batch_spans
        self._interval_s = interval_s
        self._flush_s = flush_s
        self._last_exporter = last_exporter
        self._waiting: deque[ReadableSpan] = deque()
        self._wake = threading.Event()
        self._closing = threading.Event()
        self._gave_up = threading.Event()
        self._sending = threading.Lock()
        self._warned = False
        self._thread = threading.Thread(target=self._work, name="span export", daemon=True)
        self._thread.start()

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """See SpanProcessor."""

    def on_end(self, span: ReadableSpan) -> None:
        """See SpanProcessor; any thread."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if self._closing.is_set():
            self._drop(SHUTDOWN, 1)
        elif len(self._waiting) >= self._max_spans:
            self._drop(QUEUE_FULL, 1)
        else:
            self._waiting.append(span)
            if len(self._waiting) == self._batch_spans:
                self._wake.set()

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Send what waits, on the caller's thread; how long that takes is the exporter's affair."""
        del timeout_millis
        self._send_all()
        return True

    def shutdown(self) -> None:
        """Send what is left for `flush_s` seconds, then end the exporter. Idempotent."""
        if self._closing.is_set():
            return
        self._closing.set()
        self._wake.set()
        self._thread.join(self._flush_s)
        self._gave_up.set()
        # Also ends an export that waits for its next try.
        self._exporter.shutdown()
        self._thread.join(self._flush_s)
        self._drop(SHUTDOWN, len(self._waiting))

    def _work(self) -> None:
        while not self._closing.is_set():
            self._wake.wait(self._interval_s)
            self._wake.clear()
            if not self._closing.is_set():
                self._send_all()
        if self._waiting and self._last_exporter is not None:
            self._exporter.shutdown()
            self._exporter = self._last_exporter()
        self._send_all()

    def _send_all(self) -> None:
        with self._sending:
            while self._waiting and not self._gave_up.is_set():
                count = min(len(self._waiting), self._batch_spans)
                self._send([self._waiting.popleft() for _ in range(count)])

    def _send(self, batch: list[ReadableSpan]) -> None:
        try:
            sent = self._exporter.export(batch) is SpanExportResult.SUCCESS
        except Exception:
            log.exception("spans could not be exported")
            sent = False
        if sent:
            self._counts.exported += len(batch)
            self._warned = False
        else:
            self._drop(EXPORT_FAILED, len(batch))

    def _drop(self, reason: str, count: int) -> None:
        if not count:
            return
        self._counts.dropped[reason] += count
        if not self._warned:  # Once for each time that the collector goes away.
            self._warned = True
            log.warning("spans are lost", reason=reason, dropped=dict(self._counts.dropped))
