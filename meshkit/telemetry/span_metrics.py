"""What became of this process' spans, as metrics: read when somebody scrapes."""

from __future__ import annotations

from collections.abc import Iterable

from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

from meshkit.telemetry.tracing import span_counts


class SpanMetrics(Collector):
    """`spans_exported_total`, and `spans_dropped_total` by reason (queue_full, export_failed, shutdown).

    prefix: of all names.
    """

    def __init__(self, prefix: str) -> None:
        self._prefix = prefix

    def describe(self) -> Iterable[CounterMetricFamily]:
        """The families without values."""
        return [self._exported(), self._dropped()]

    def collect(self) -> Iterable[CounterMetricFamily]:
        """The families as they are now; all reasons from the start, so that a rate sees the first loss."""
        counts = span_counts()
        exported, dropped = self._exported(), self._dropped()
        exported.add_metric([], counts.exported)
        for reason, count in counts.dropped.items():
            dropped.add_metric([reason], count)
        return [exported, dropped]

    def _exported(self) -> CounterMetricFamily:
        return CounterMetricFamily(self._prefix + "spans_exported", "Spans that the collector has taken")

    def _dropped(self) -> CounterMetricFamily:
        return CounterMetricFamily(
            self._prefix + "spans_dropped", "Spans lost on their way to the collector", labels=["reason"]
        )
