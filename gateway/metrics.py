"""What the gateway measures: requests, and the latencies that a client sees, by model."""

from __future__ import annotations

import time
from collections.abc import Callable

from meshkit.telemetry.metrics import Metrics


class GatewayMetrics:
    """The gateway's metrics under their well-known names."""

    def __init__(self, metrics: Metrics) -> None:
        self.registry = metrics.registry
        labels = ("model",)
        self.requests = metrics.counter("num_requests_total", labels=labels)
        self.aborted = metrics.counter("num_aborted_requests_total", labels=labels)
        self.first_token = metrics.histogram("time_to_first_token_seconds", labels=labels)
        self.inter_token = metrics.histogram("inter_token_latency_seconds", labels=labels)
        self.e2e = metrics.histogram("e2e_request_latency_seconds", labels=labels)

    def declare_models(self, names: list[str]) -> None:
        """Show every model at once with zeros: a rate over a counter that appears late misses its start."""
        for name in names:
            self.requests.labels(name)
            self.aborted.labels(name)


class RequestTimer:
    """Times one request, from its construction (receipt) on. Nothing is counted before it was accepted."""

    def __init__(
        self, metrics: GatewayMetrics, model: str, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._metrics = metrics
        self._clock = clock
        self._received_at = clock()
        self._last_token_at: float | None = None
        self._accepted = False
        self._model = model
        self._inter_token = metrics.inter_token.labels(model)

    def accepted(self) -> None:
        """The scheduler has it."""
        self._accepted = True
        self._metrics.requests.labels(self._model).inc()

    def tokens(self, count: int) -> None:
        """`count` tokens came at once: the gap before them is shared out, so that each token counts."""
        now = self._clock()
        if self._last_token_at is None:
            self._metrics.first_token.labels(self._model).observe(now - self._received_at)
            count -= 1
            gap = 0.0
        else:
            gap = (now - self._last_token_at) / count
        for _ in range(count):
            self._inter_token.observe(gap)
        self._last_token_at = now

    def ended(self, *, aborted: bool) -> None:
        """It ended; aborted: by cancel, error or a client that went away."""
        if not self._accepted:
            return
        if aborted:
            self._metrics.aborted.labels(self._model).inc()
        else:
            self._metrics.e2e.labels(self._model).observe(self._clock() - self._received_at)
