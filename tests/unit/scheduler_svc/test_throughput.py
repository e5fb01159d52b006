"""Tokens a second, however often somebody looks."""

from __future__ import annotations

import pytest

from scheduler_svc.throughput import WINDOW_S, Throughput


@pytest.mark.parametrize("every_s", [0.1, 1.0, 5.0, 15.0, 60.0])
def test_a_steady_rate_is_shown_whatever_the_interval_of_scrapes(every_s: float) -> None:
    throughput, now = Throughput(100.0), 100.0
    for _ in range(50):
        now += every_s
        assert throughput.rate(int((now - 100) * 40), now=now) == pytest.approx(40, rel=0.3, abs=15)
    assert throughput.rate(int((now - 100) * 40), now=now) == pytest.approx(40, rel=0.05)


def test_a_second_scraper_right_after_the_first_sees_the_same() -> None:
    throughput = Throughput(0.0)
    first = throughput.rate(1000, now=10.0)
    assert throughput.rate(1000, now=10.01) == pytest.approx(first, rel=0.01)


def test_it_falls_to_zero_when_nothing_is_made_and_keeps_no_more_than_a_window() -> None:
    throughput = Throughput(0.0)
    for second in range(1, 1000):
        throughput.rate(second * 10, now=float(second))
    assert len(throughput._moments) <= WINDOW_S + 2
    rates = [throughput.rate(9990, now=float(second)) for second in range(1000, 1012)]
    assert (rates[0], rates[-1]) == (9.0, 0.0)


def test_before_any_time_has_passed_there_is_no_rate() -> None:
    assert Throughput(5.0).rate(10, now=5.0) == 0
