"""Deadlines of steps follow what steps have taken."""

from __future__ import annotations

import pytest

from scheduler_svc.step_time import MOST_STEPS_AHEAD, StepDeadline, StepTimePredictor, share_time

LIMITS = StepDeadline(floor_s=1.0, factor=10.0)


def test_the_floor_holds_while_nothing_is_known_and_for_fast_steps() -> None:
    times = StepTimePredictor()
    assert times.deadline(LIMITS, prefill_tokens=4096) == 1.0
    times.observe(0.01, prefill_tokens=0)
    assert times.deadline(LIMITS, prefill_tokens=0) == 1.0


def test_a_slow_device_gets_a_multiple_of_what_it_took() -> None:
    times = StepTimePredictor()
    for _ in range(20):
        times.observe(0.5, prefill_tokens=0)
    assert times.deadline(LIMITS, prefill_tokens=0) == pytest.approx(5.0)


def test_prompt_tokens_count_by_number_on_top_of_a_decode_step() -> None:
    times = StepTimePredictor()
    for _ in range(60):
        times.observe(0.5, prefill_tokens=0)
        times.observe(2.5, prefill_tokens=1000)
    assert times.predict(prefill_tokens=2000) == pytest.approx(4.5)
    assert times.deadline(LIMITS, prefill_tokens=2000) == pytest.approx(45.0)


def test_the_prediction_follows_a_device_that_becomes_slower() -> None:
    times = StepTimePredictor()
    times.observe(0.1, prefill_tokens=0)
    for _ in range(40):
        times.observe(1.0, prefill_tokens=0)
    assert times.predict(prefill_tokens=0) == pytest.approx(1.0, rel=0.01)


def test_steps_whose_results_come_together_may_take_as_long_together() -> None:
    times = StepTimePredictor()
    times.observe(0.5, prefill_tokens=0)
    assert times.deadline(LIMITS, prefill_tokens=0, steps=4) == pytest.approx(20.0)


def test_a_window_holds_as_many_short_steps_as_fit_but_one_long_one_and_never_too_many() -> None:
    times = StepTimePredictor()
    assert times.steps_within(0.02) == 1, "nothing is known yet"
    times.observe(0.006, prefill_tokens=0)
    assert times.steps_within(0.02) == 3
    assert times.steps_within(0.0) == 1
    slow, free = StepTimePredictor(), StepTimePredictor()
    slow.observe(0.5, prefill_tokens=0)
    assert slow.steps_within(0.02) == 1
    free.observe(1e-6, prefill_tokens=0)
    assert free.steps_within(0.02) == MOST_STEPS_AHEAD


def test_the_time_of_steps_that_come_together_is_shared_by_what_the_device_says() -> None:
    assert share_time(1.2, [0.1, 0.3]) == pytest.approx([0.3, 0.9])
    assert share_time(1.2, [0.0, 0.0, 0.0]) == pytest.approx([0.4, 0.4, 0.4])
