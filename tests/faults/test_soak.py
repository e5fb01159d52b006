"""What a soak says of growth."""

from __future__ import annotations

import pytest

from chaos.report import Outcome
from chaos.scenarios.soak import growth_percent_per_hour, judge_growth


def test_growth_is_the_slope_after_the_warm_up() -> None:
    minutes = [60.0 * number for number in range(40)]
    filling = [50.0 + number for number in range(10)]
    steady = [100.0 + (number % 2) for number in range(30)]
    assert growth_percent_per_hour(minutes, filling + steady) == pytest.approx(0.0, abs=0.5)
    leaking = [100.0 + 0.1 * number for number in range(30)]  # 6 MiB an hour of some 101.
    assert growth_percent_per_hour(minutes, filling + leaking) == pytest.approx(5.9, abs=0.1)


def test_a_few_samples_say_nothing_and_a_bound_without_a_figure_is_not_kept() -> None:
    outcome = Outcome(figures={"at_s": [1.0], "scheduler_rss_mib": [50.0]})
    judge_growth(outcome)
    assert "scheduler_growth_percent_per_hour" not in outcome.figures
