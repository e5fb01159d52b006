"""Latencies are counted where a request ran, and the places that have series of their own are bounded."""

from __future__ import annotations

import pytest
from prometheus_client.parser import text_string_to_metric_families

from gateway import metrics as module
from gateway.generation_spec import Placed
from gateway.metrics import GatewayMetrics, RequestTimer
from gateway.token_gaps import NAME, TokenGaps
from meshkit.telemetry.metrics import Metrics


class Clock:
    """Seconds that a test sets."""

    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def metrics() -> GatewayMetrics:
    return GatewayMetrics(Metrics())


def value(metrics: GatewayMetrics, name: str, worker: str) -> float | None:
    group = "other" if worker == "other" else "g"
    labels = {"model": "m", "group": group, "worker": worker, "chip": "other" if group == "other" else "x"}
    return metrics.registry.get_sample_value(f"chipmesh_{name}", labels)


def place(worker: str) -> Placed:
    return Placed(group="g", worker=worker, chip="x")


def test_each_latency_has_its_own_meaning(metrics: GatewayMetrics) -> None:
    clock = Clock()
    timer = RequestTimer(metrics, "m", clock=clock)
    timer.accepted()
    timer.placed(place("w0"))
    clock.now += 0.5
    assert timer.tokens(1)
    clock.now += 1.0
    assert not timer.tokens(4)
    clock.now += 2.0
    timer.ended(aborted=False)
    assert value(metrics, "time_to_first_token_seconds_sum", "w0") == pytest.approx(0.5)
    assert value(metrics, "inter_token_latency_seconds_count", "w0") == 4
    assert value(metrics, "inter_token_latency_seconds_sum", "w0") == pytest.approx(1.0)
    assert value(metrics, "time_per_output_token_seconds_sum", "w0") == pytest.approx(0.25)
    assert value(metrics, "e2e_request_latency_seconds_sum", "w0") == pytest.approx(3.5)


def test_after_a_move_times_are_counted_at_the_new_place(metrics: GatewayMetrics) -> None:
    timer = RequestTimer(metrics, "m")
    timer.accepted()
    timer.placed(place("w0"))
    timer.tokens(3)
    timer.placed(place("w1"))
    timer.tokens(2)
    timer.ended(aborted=False)
    assert value(metrics, "inter_token_latency_seconds_count", "w0") == 2
    assert value(metrics, "inter_token_latency_seconds_count", "w1") == 2
    assert value(metrics, "e2e_request_latency_seconds_count", "w0") == 0
    assert value(metrics, "e2e_request_latency_seconds_count", "w1") == 1


def test_an_aborted_request_and_one_of_a_single_token_have_no_time_per_token(metrics: GatewayMetrics) -> None:
    for tokens, aborted in ((5, True), (1, False)):
        timer = RequestTimer(metrics, "m")
        timer.accepted()
        timer.placed(place("w0"))
        timer.tokens(tokens)
        timer.ended(aborted=aborted)
    assert value(metrics, "time_per_output_token_seconds_count", "w0") == 0
    assert value(metrics, "e2e_request_latency_seconds_count", "w0") == 1


def test_places_beyond_the_bound_are_counted_together(
    metrics: GatewayMetrics, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "MAX_PLACEMENTS", 3)
    for number in range(10):
        timer = RequestTimer(metrics, "m")
        timer.placed(place(f"w{number}"))
        timer.tokens(1)
    counts = [value(metrics, "time_to_first_token_seconds_count", f"w{number}") for number in range(10)]
    assert counts == [1, 1, 1, *[None] * 7]
    assert value(metrics, "time_to_first_token_seconds_count", "other") == 7


def test_gaps_counted_together_show_as_the_librarys_histogram_shows_them() -> None:
    gaps = (0.0, 0.0005, 0.00051, 0.03, 7.0, 1000.0)
    ours, librarys = Metrics(), Metrics()
    series = TokenGaps(ours, labels=("model",)).series("m")
    histogram = librarys.histogram(NAME, labels=("model",)).labels("m")
    for count, gap in enumerate(gaps, start=1):
        series.observe(gap, count)
        for _ in range(count):
            histogram.observe(gap)
    assert _samples(ours) == pytest.approx(_samples(librarys))
    assert _samples(ours)[(f"chipmesh_{NAME}_count", "")] == 21


def _samples(metrics: Metrics) -> dict[tuple[str, str], float]:
    """Of that histogram, by name and bound, as a scraper reads them."""
    return {
        (sample.name, sample.labels.get("le", "")): sample.value
        for family in text_string_to_metric_families(metrics.expose().decode())
        for sample in family.samples
        if family.name == f"chipmesh_{NAME}"
    }
