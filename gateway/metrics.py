"""What the gateway measures: requests, and the latencies that a client sees, by model and where they ran."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from prometheus_client import Histogram

from gateway.generation_spec import Placed
from gateway.token_gaps import GapSeries, TokenGaps
from meshkit.telemetry.metrics import Metrics

PLACEMENT = ("model", "group", "worker", "chip")
MAX_PLACEMENTS = 256
"""So many have series of their own; what comes after them is counted together, as `other`."""
_OTHER = Placed(group="other", worker="other", chip="other")
_NOWHERE = Placed()


@dataclass(frozen=True, slots=True)
class LatencySeries:
    """The latencies of the requests of one model at one place."""

    first_token: Histogram
    inter_token: GapSeries
    per_output_token: Histogram
    e2e: Histogram


class GatewayMetrics:
    """The gateway's metrics under their well-known names."""

    def __init__(self, metrics: Metrics) -> None:
        self.registry = metrics.registry
        labels = ("model",)
        self.requests = metrics.counter("num_requests_total", labels=labels)
        self.aborted = metrics.counter("num_aborted_requests_total", labels=labels)
        self._first_token = metrics.histogram("time_to_first_token_seconds", labels=PLACEMENT)
        self._inter_token = TokenGaps(metrics, labels=PLACEMENT)
        self._per_output_token = metrics.histogram("time_per_output_token_seconds", labels=PLACEMENT)
        self._e2e = metrics.histogram("e2e_request_latency_seconds", labels=PLACEMENT)
        self._series: dict[tuple[str, str, str, str], LatencySeries] = {}

    def declare_models(self, names: list[str]) -> None:
        """Show every model at once with zeros: a rate over a counter that appears late misses its start."""
        for name in names:
            self.requests.labels(name)
            self.aborted.labels(name)

    def latencies(self, model: str, placement: Placed) -> LatencySeries:
        """The series of one place."""
        key = (model, placement.group, placement.worker, placement.chip)
        known = self._series.get(key)
        if known is not None:
            return known
        if len(self._series) >= MAX_PLACEMENTS and placement is not _OTHER:
            return self.latencies(model, _OTHER)
        made = self._series[key] = LatencySeries(
            self._first_token.labels(*key),
            self._inter_token.series(*key),
            self._per_output_token.labels(*key),
            self._e2e.labels(*key),
        )
        return made


class RequestTimer:
    """Times one request, from its construction (receipt) on. Nothing is counted before it was accepted."""

    def __init__(
        self, metrics: GatewayMetrics, model: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._received_at = clock()
        self._first_token_at: float | None = None
        self._last_token_at = 0.0
        self._token_count = 0
        self._accepted = False
        self._model = model
        self._series: LatencySeries | None = None

    def accepted(self) -> None:
        """The scheduler has it."""
        self._accepted = True
        self._metrics.requests.labels(self._model).inc()

    def placed(self, placement: Placed) -> None:
        """What is measured from now on is measured there."""
        self._series = self._metrics.latencies(self._model, placement)

    def tokens(self, count: int) -> bool:
        """`count` tokens came at once: the gap before them is shared out, so that each token counts.

        Returns whether the first one is among them.
        """
        now, series = self._clock(), self._here()
        is_first = self._first_token_at is None
        self._token_count += count
        if is_first:
            self._first_token_at = now
            series.first_token.observe(now - self._received_at)
            count -= 1
            gap = 0.0
        else:
            gap = (now - self._last_token_at) / count
        series.inter_token.observe(gap, count)
        self._last_token_at = now
        return is_first

    def ended(self, *, aborted: bool) -> None:
        """It ended; aborted: by cancel, error or a client that went away."""
        if not self._accepted:
            return
        if aborted:
            self._metrics.aborted.labels(self._model).inc()
            return
        series = self._here()
        series.e2e.observe(self._clock() - self._received_at)
        if self._first_token_at is not None and self._token_count > 1:
            gap = (self._last_token_at - self._first_token_at) / (self._token_count - 1)
            series.per_output_token.observe(gap)

    def _here(self) -> LatencySeries:
        if self._series is None:
            self.placed(_NOWHERE)
        assert self._series is not None
        return self._series
