"""A token bucket: what may be spent in any time, and when there is room again."""

from __future__ import annotations

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.budget import TokenBucket

LIMITS = st.integers(1, 10_000)
MOMENTS = st.lists(st.tuples(st.integers(0, 90_000), st.integers(1, 3_000)), max_size=30)
"""(milliseconds since the last one, amount)"""


@given(limit=LIMITS, moments=MOMENTS)
def test_its_level_is_that_of_exact_arithmetic(limit: int, moments: list[tuple[int, int]]) -> None:
    bucket, now_ms = TokenBucket(limit, now=0.0), 0
    level, rate_per_ms = Fraction(limit), Fraction(limit, 60_000)
    for pause_ms, amount in moments:
        now_ms += pause_ms
        level = min(Fraction(limit), level + pause_ms * rate_per_ms) - amount
        bucket.spend(amount, now_ms / 1000)
        assert bucket.level(now_ms / 1000) == pytest.approx(float(level), abs=1e-3)


@given(limit=LIMITS, moments=MOMENTS)
def test_no_window_spends_more_than_its_share_and_the_last_overdraft(
    limit: int, moments: list[tuple[int, int]]
) -> None:
    bucket, now_ms = TokenBucket(limit, now=0.0), 0
    spent: list[tuple[int, int]] = []
    for pause_ms, amount in moments:
        now_ms += pause_ms
        if bucket.wait_s(now_ms / 1000) == 0:
            bucket.spend(amount, now_ms / 1000)
            spent.append((now_ms, amount))
    for first, (begin_ms, _) in enumerate(spent):
        total = 0
        for end_ms, amount in spent[first:]:
            # Before the last one there was room for at least 1 still.
            assert total <= limit * (1 + (end_ms - begin_ms) / 60_000) + 1e-3
            total += amount


@given(limit=LIMITS, moments=MOMENTS)
def test_there_is_room_exactly_when_it_says(limit: int, moments: list[tuple[int, int]]) -> None:
    bucket, now = TokenBucket(limit, now=0.0), 0.0
    for pause_ms, amount in moments:
        now += pause_ms / 1000
        bucket.spend(amount, now)
        wait_s = bucket.wait_s(now)
        assert bucket.wait_s(now + wait_s) == 0
        if wait_s > 0.01:
            assert bucket.wait_s(now + 0.99 * wait_s) > 0


def test_what_is_given_back_can_be_spent_again_and_no_more_than_that() -> None:
    bucket = TokenBucket(60, now=0.0)
    bucket.spend(60, 0.0)
    assert bucket.wait_s(0.0) == pytest.approx(1.0)
    bucket.spend(-40, 0.0)
    assert bucket.level(0.0) == 40
    bucket.spend(-40, 0.0)
    assert bucket.level(0.0) == 60


def test_another_limit_leaves_what_was_spent_spent() -> None:
    bucket = TokenBucket(60, now=0.0)
    bucket.spend(50, 0.0)
    bucket.change_limit(120, 0.0)
    assert bucket.level(0.0) == 70
    bucket.change_limit(30, 0.0)
    assert bucket.level(0.0) == -20
    assert bucket.level(60.0) == 10
    assert bucket.level(600.0) == 30


def test_a_clock_that_stands_still_or_goes_back_fills_nothing() -> None:
    bucket = TokenBucket(60, now=100.0)
    bucket.spend(30, 100.0)
    assert bucket.level(40.0) == 30
    bucket.spend(1, 40.0)
    assert bucket.level(100.0) == 29
