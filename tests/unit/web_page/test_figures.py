"""Rates and percentiles, read off the gateway's metrics."""

from __future__ import annotations

import math

import pytest

from gateway.generation_spec import Placed
from gateway.metrics import GatewayMetrics, RequestTimer
from gateway.web_page.figures import KEPT_SAMPLES, Figures, quantile
from meshkit.telemetry.metrics import Metrics


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_tokens_are_counted_where_they_were_made_and_first_tokens_timed() -> None:
    clock, registry = Clock(), Metrics()
    metrics = GatewayMetrics(registry)
    figures = Figures(registry.registry, lambda: 3, clock=clock)
    for worker, first_s, count in (("w0", 0.2, 9), ("w1", 0.6, 5)):
        timer = RequestTimer(metrics, "m", clock=clock)
        timer.accepted()
        timer.placed(Placed(group="g", worker=worker, chip="x"))
        clock.now += first_s
        timer.tokens(1)
        timer.tokens(count)
    clock.now = 102.0
    figures.take()
    (sample,) = figures.samples
    assert sample["tokens_per_s_of_workers"] == {"w0": 5.0, "w1": 3.0}
    assert (sample["tokens_per_s"], sample["requests_per_s"], sample["live"]) == (8.0, 1.0, 3)
    assert 0.1 < sample["ttft_p50_s"] <= 0.25
    assert 0.5 < sample["ttft_p90_s"] <= 1.0
    for _ in range(20):
        clock.now += 1
        figures.take()
    assert figures.samples[-1]["tokens_per_s"] == 0
    assert figures.samples[-1]["ttft_p50_s"] is None, "what began long ago counts no more"


def test_a_viewer_gets_each_sample_once_and_at_most_two_minutes_of_them() -> None:
    figures = Figures(Metrics().registry, lambda: 0)
    assert figures.beyond(0)["samples"] == []
    for _ in range(3):
        figures.take()
    assert len(figures.beyond(0)["samples"]) == 3
    seen = figures.feed.revision
    assert figures.beyond(seen)["samples"] == []
    figures.take()
    assert len(figures.beyond(seen)["samples"]) == 1
    for _ in range(KEPT_SAMPLES):
        figures.take()
    assert len(figures.beyond(seen)["samples"]) == KEPT_SAMPLES


@pytest.mark.parametrize(
    ("buckets", "share", "expected"),
    [
        ({}, 0.5, None),
        ({1.0: 0.0, math.inf: 0.0}, 0.5, None),
        ({1.0: 4.0, 2.0: 4.0, math.inf: 4.0}, 0.5, 0.5),
        ({1.0: 0.0, 2.0: 4.0, math.inf: 4.0}, 0.5, 1.5),
        ({1.0: 2.0, 2.0: 4.0, math.inf: 4.0}, 0.9, 1.8),
        ({1.0: 0.0, 2.0: 0.0, math.inf: 4.0}, 0.5, 2.0),
    ],
)
def test_a_quantile_lies_evenly_within_its_bucket(
    buckets: dict[float, float], share: float, expected: float | None
) -> None:
    assert quantile(buckets, share) == (None if expected is None else pytest.approx(expected))
