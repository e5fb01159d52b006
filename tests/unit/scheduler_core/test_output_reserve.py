from __future__ import annotations

import hypothesis.strategies as st
from hypothesis import given

from scheduler_svc.core.output_reserve import CLIP_TOKENS, DECAY_STEPS, OutputReserve


def test_each_running_request_has_one_token_less_to_come_after_every_step() -> None:
    reserve = OutputReserve()
    reserve.enter(10)
    reserve.enter(3)
    for left in (13, 11, 9, 7, 6, 5):
        assert reserve.tokens_left == left
        reserve.advance()


def test_seven_tenths_are_wanted_at_first_and_a_tenth_after_600_quiet_steps() -> None:
    reserve = OutputReserve()
    assert reserve.wanted_tokens(1000) == 700
    for _ in range(DECAY_STEPS + 50):
        reserve.advance()
    assert reserve.wanted_tokens(1000) == 100


def test_a_retraction_makes_it_careful_again() -> None:
    reserve = OutputReserve()
    for _ in range(DECAY_STEPS):
        reserve.advance()
    reserve.retracted()
    assert reserve.wanted_tokens(1000) == 700


def test_limits_far_beyond_what_is_made_are_clipped() -> None:
    reserve = OutputReserve()
    reserve.enter(1_000_000)
    assert reserve.tokens_left == CLIP_TOKENS


@given(st.lists(st.tuples(st.integers(1, 20), st.integers(0, 25)), max_size=12))
def test_the_sum_is_that_of_the_requests_one_by_one(stays: list[tuple[int, int]]) -> None:
    """Each request enters at the start, may make so many tokens, and leaves after so many steps."""
    reserve = OutputReserve()
    dues = [reserve.enter(tokens) for tokens, _ in stays]
    for step in range(30):
        for due, (_, leaves_after) in zip(dues, stays, strict=True):
            if leaves_after == step:
                reserve.leave(due)
        running = [tokens for tokens, leaves_after in stays if leaves_after > step]
        assert reserve.tokens_left == sum(max(0, tokens - step) for tokens in running)
        reserve.advance()
