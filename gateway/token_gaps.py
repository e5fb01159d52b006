"""The histogram of times between tokens: tokens that come together are counted by one call, as the client
library's own histogram, with one call and a lock or two for each, cost as much as a token's text.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from itertools import accumulate

from prometheus_client.core import HistogramMetricFamily
from prometheus_client.registry import Collector

from meshkit.telemetry.metrics import INTER_TOKEN_BUCKETS, KNOWN, PREFIX, Metrics

NAME = "inter_token_latency_seconds"
_BOUNDS = [*map(str, INTER_TOKEN_BUCKETS), "+Inf"]


class GapSeries:
    """The gaps of one place. Counted on the event loop, read at a scrape."""

    __slots__ = ("counts", "seconds")

    def __init__(self) -> None:
        self.counts = [0] * len(_BOUNDS)
        self.seconds = 0.0

    def observe(self, gap_s: float, count: int) -> None:
        """`count` gaps of `gap_s` seconds each."""
        self.counts[bisect_left(INTER_TOKEN_BUCKETS, gap_s)] += count
        self.seconds += gap_s * count


class TokenGaps(Collector):
    """`inter_token_latency_seconds` of all places."""

    def __init__(self, metrics: Metrics, *, labels: tuple[str, ...]) -> None:
        self._labels = labels
        self._series: dict[tuple[str, ...], GapSeries] = {}
        metrics.registry.register(self)

    def series(self, *values: str) -> GapSeries:
        """The one with these values of the labels; shown from now on."""
        return self._series.setdefault(values, GapSeries())

    def describe(self) -> Iterable[HistogramMetricFamily]:
        """The family without values."""
        return [self._family()]

    def collect(self) -> Iterable[HistogramMetricFamily]:
        """The family as it is now."""
        family = self._family()
        for values, series in list(self._series.items()):
            buckets = list(zip(_BOUNDS, map(float, accumulate(series.counts)), strict=True))
            family.add_metric(values, buckets, series.seconds)
        return [family]

    def _family(self) -> HistogramMetricFamily:
        return HistogramMetricFamily(PREFIX + NAME, KNOWN[NAME], labels=self._labels)
