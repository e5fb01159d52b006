"""What clients of this gateway see, once a second: tokens and requests per second, time to first token.

Read off the gateway's own metrics, so the page and a dashboard cannot disagree.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from prometheus_client import CollectorRegistry
from prometheus_client.samples import Sample

from gateway.web_page.feed import Feed
from meshkit.telemetry.metrics import PREFIX

INTERVAL_S = 1.0
KEPT_SAMPLES = 120
WINDOW_SAMPLES = 15
"""Percentiles are over the last so many seconds: in one alone hardly a request begins."""


_FIRST = f"{PREFIX}time_to_first_token_seconds"
_BETWEEN = f"{PREFIX}inter_token_latency_seconds"
_REQUESTS = f"{PREFIX}num_requests_total"
_READ = (f"{_FIRST}_bucket", f"{_FIRST}_count", f"{_BETWEEN}_count", _REQUESTS)


@dataclass
class _Reading:
    """Counts so far. tokens: by worker. first_tokens: of the TTFT histogram, up to each bound in seconds."""

    at_s: float
    requests: float = 0.0
    tokens: Counter[str] = field(default_factory=Counter)
    first_tokens: Counter[float] = field(default_factory=Counter)


class Figures:
    """The last two minutes. live_count: requests that go on now. clock: monotonic seconds."""

    def __init__(
        self,
        registry: CollectorRegistry,
        live_count: Callable[[], int],
        *,
        feed: Feed | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.feed = feed or Feed()
        self.samples: deque[dict[str, Any]] = deque(maxlen=KEPT_SAMPLES)
        self._metrics = registry.restricted_registry(_READ)
        self._live_count = live_count
        self._clock = clock
        self._readings: deque[_Reading] = deque([self._read()], maxlen=WINDOW_SAMPLES + 1)

    def beyond(self, revision: int) -> dict[str, Any]:
        """The samples since that revision of the feed: each is one."""
        fresh = self.feed.revision - max(revision, 1)
        return {"interval_s": INTERVAL_S, "samples": list(self.samples)[-fresh:] if fresh else []}

    async def run(self) -> None:
        """Take a sample every second; returns never."""
        while True:
            await asyncio.sleep(INTERVAL_S)
            self.take()

    def take(self) -> None:
        """One sample of what happened since the last one."""
        now, last, oldest = self._read(), self._readings[-1], self._readings[0]
        elapsed_s = max(now.at_s - last.at_s, 1e-9)
        window = {bound: count - oldest.first_tokens[bound] for bound, count in now.first_tokens.items()}
        workers = {worker: (count - last.tokens[worker]) / elapsed_s for worker, count in now.tokens.items()}
        self._readings.append(now)
        self.samples.append(
            {
                "requests_per_s": (now.requests - last.requests) / elapsed_s,
                "tokens_per_s": sum(workers.values()),
                "tokens_per_s_of_workers": workers,
                "ttft_p50_s": quantile(window, 0.5),
                "ttft_p90_s": quantile(window, 0.9),
                "live": self._live_count(),
            }
        )
        self.feed.bump()

    def _read(self) -> _Reading:
        reading = _Reading(self._clock())
        for family in self._metrics.collect():
            for sample in family.samples:
                _count(reading, sample)
        return reading


def quantile(buckets: Mapping[float, float], share: float) -> float | None:
    """Seconds below which `share` of the observations lie, even within a bucket, as Prometheus has it; None
    without any. buckets: cumulative counts by upper bound; beyond the last finite bound it is that bound.
    """
    total = max(buckets.values(), default=0.0)
    if total <= 0:
        return None
    wanted, below, lower = share * total, 0.0, 0.0
    for bound, count in sorted(buckets.items()):
        if count >= wanted and count > below:
            if math.isinf(bound):
                return lower
            return lower + (bound - lower) * (wanted - below) / (count - below)
        below, lower = count, bound
    return lower


def _count(reading: _Reading, sample: Sample) -> None:
    if sample.name == f"{_FIRST}_bucket":
        reading.first_tokens[float(sample.labels["le"])] += int(sample.value)
    elif sample.name in (f"{_FIRST}_count", f"{_BETWEEN}_count"):
        reading.tokens[sample.labels.get("worker", "")] += int(sample.value)
    elif sample.name == _REQUESTS:
        reading.requests += sample.value
