"""A group loses its traffic for what it does often enough, and never for a single slow or failed request."""

from __future__ import annotations

import pytest

from scheduler_svc.core.guard import Bounds, Ended, Guard

GOOD = Ended(failed=False, ttft_s=0.1, token_gap_s=0.01)
BAD = Ended(failed=True)
SLOW = Ended(failed=False, ttft_s=3.0, token_gap_s=0.5)


def feed(guard: Guard, *runs: tuple[Ended, int]) -> str:
    """The first reason that comes."""
    for ended, count in runs:
        for _ in range(count):
            if reason := guard.record_end(ended):
                return reason
    return ""


def test_without_bounds_nothing_is_ever_a_reason() -> None:
    assert feed(Guard(Bounds()), (BAD, 500), (SLOW, 500)) == ""


def test_errors_above_their_share_are_a_reason_and_below_are_not() -> None:
    assert feed(Guard(Bounds(max_error_share=0.1)), (GOOD, 90), (BAD, 10)) == ""
    reason = feed(Guard(Bounds(max_error_share=0.1)), (GOOD, 80), (BAD, 20))
    assert "9 of the last 89 requests failed" in reason
    assert "10.0%" in reason


def test_too_few_requests_are_no_reason() -> None:
    assert feed(Guard(Bounds(max_error_share=0.1)), (BAD, 19)) == ""
    assert feed(Guard(Bounds(max_error_share=0.1)), (BAD, 20)) != ""


@pytest.mark.parametrize(
    ("bounds", "said"),
    [(Bounds(max_ttft_s=1.0), "TTFT is 3.000 s"), (Bounds(max_token_gap_s=0.1), "token gap is 0.500 s")],
)
def test_a_tenth_of_slow_requests_is_a_reason(bounds: Bounds, said: str) -> None:
    assert feed(Guard(bounds), (GOOD, 95), (SLOW, 5)) == ""
    assert said in feed(Guard(bounds), (GOOD, 80), (SLOW, 20))


def test_only_the_newest_requests_count() -> None:
    guard = Guard(Bounds(max_error_share=0.2, window=50))
    assert feed(guard, (GOOD, 50), (BAD, 10), (GOOD, 50)) == ""
    assert feed(guard, (BAD, 10)) == ""
    assert feed(guard, (BAD, 1)) != ""


def test_tokens_that_differ_from_the_other_groups_are_a_reason() -> None:
    guard = Guard(Bounds(min_agreement=0.9, min_requests=3))
    assert [guard.record_comparison(equal_tokens=equal, tokens=10) for equal in (10, 9, 10)] == ["", "", ""]
    assert "86.0%" not in guard.record_comparison(equal_tokens=10, tokens=10)
    assert "% of the tokens" in guard.record_comparison(equal_tokens=1, tokens=10)


def test_a_reset_forgets_what_was() -> None:
    guard = Guard(Bounds(max_error_share=0.1))
    assert feed(guard, (BAD, 20)) != ""
    guard.reset()
    assert feed(guard, (BAD, 19)) == ""
