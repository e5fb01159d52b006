from __future__ import annotations

import hypothesis.strategies as st
import pytest
from hypothesis import given

from meshkit.drain_rate import LEAST_WAIT_S, MOST_WAIT_S, DrainRate


def steady(interval_s: float, *, count: int = 200) -> tuple[DrainRate, float]:
    """One that loses a unit each interval, and the time of the last."""
    rate = DrainRate(now=0.0)
    for number in range(1, count + 1):
        rate.left(1, number * interval_s)
    return rate, count * interval_s


def test_the_time_to_wait_is_that_in_which_one_departs() -> None:
    for interval_s in (0.2, 3.0):
        rate, now = steady(interval_s)
        assert rate.refuse(1, now) == pytest.approx(interval_s)


def test_each_that_is_refused_is_told_a_later_time_until_as_many_have_departed() -> None:
    rate, now = steady(0.5)
    assert [rate.refuse(1, now) for _ in range(3)] == pytest.approx([0.5, 1.0, 1.5])
    for number in range(1, 4):
        rate.left(1, now + number * 0.5)
    assert rate.refuse(1, now + 1.5) == pytest.approx(0.5)


def test_more_units_take_longer() -> None:
    rate, now = steady(0.01)
    assert rate.refuse(400, now) == pytest.approx(4.0)


def test_while_nothing_departs_the_time_grows_with_that() -> None:
    rate, now = steady(0.1)
    assert rate.refuse(1, now + 7.0) == pytest.approx(7.0)
    unknown = DrainRate(now=0.0)
    assert unknown.refuse(1, 4.0) == 4.0


def test_the_time_while_it_was_empty_does_not_count() -> None:
    rate, now = steady(0.1)
    rate.begin(now + 3600.0)
    rate.left(1, now + 3600.1)
    assert rate.refuse(1, now + 3600.1) == pytest.approx(0.1)


def test_the_newest_pace_counts_more_and_more() -> None:
    rate, now = steady(0.1)
    for number in range(1, 101):
        rate.left(1, now + number * 2.0)
    assert rate.refuse(1, now + 200.0) == pytest.approx(2.0, rel=0.01)


@given(
    st.lists(
        st.tuples(st.sampled_from(["begin", "left", "refuse"]), st.integers(0, 10_000), st.floats(0, 100)),
        max_size=60,
    )
)
def test_it_is_always_a_time_within_bounds(moves: list[tuple[str, int, float]]) -> None:
    rate, now = DrainRate(now=0.0), 0.0
    for kind, amount, pause_s in moves:
        now += pause_s
        if kind == "begin":
            rate.begin(now)
        elif kind == "left":
            rate.left(amount, now)
        else:
            assert LEAST_WAIT_S <= rate.refuse(amount, now) <= MOST_WAIT_S
