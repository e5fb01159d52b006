"""The verdict: the default stays unless another setting wins by more than the noise that was seen."""

from __future__ import annotations

import math
import statistics

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from meshkit.cli.tuning.space import DEFAULT
from meshkit.cli.tuning.verdict import LEAST_ROUNDS, Pair, judge, spread
from tests.unit.tuning.machines import Machine, flat, peaked

scores = st.floats(0.1, 1000.0)
pairs = st.lists(st.builds(Pair, scores, scores), max_size=9)


@given(pairs)
def test_what_is_accepted_scored_better_than_the_default_by_its_own_figures(rounds: list[Pair]) -> None:
    verdict = judge(rounds)
    if not verdict.accepted:
        return
    default = [pair.default for pair in rounds]
    other = [pair.other for pair in rounds]
    assert len(rounds) >= LEAST_ROUNDS
    assert statistics.median(other) > statistics.median(default)
    assert statistics.median(other) / statistics.median(default) - 1 > spread(default)
    assert sum(pair.other > pair.default for pair in rounds) >= len(rounds) - 1


@given(st.integers(0, 2**32))
@settings(max_examples=15, deadline=None)
def test_the_whole_search_never_returns_what_was_worse_side_by_side(seed: int) -> None:
    chosen, rounds, _ = Machine(peaked, seed, noise=0.1).tune()
    if chosen != DEFAULT:
        assert statistics.median(pair.other for pair in rounds) > statistics.median(
            pair.default for pair in rounds
        )


@pytest.mark.parametrize(("noise", "drift"), [(0.02, 0.0), (0.1, 0.0), (0.05, -0.5)])
def test_where_nothing_makes_a_difference_the_default_stays_in_at_least_95_of_100_seeds(
    noise: float, drift: float
) -> None:
    others = [
        seed for seed in range(100) if Machine(flat, seed, noise=noise, drift=drift).tune()[0] != DEFAULT
    ]
    assert len(others) <= 5, others


def test_a_gain_beyond_the_noise_is_found_in_at_least_95_of_100_seeds() -> None:
    found = [Machine(peaked, seed, noise=0.03).tune()[0] for seed in range(100)]
    assert sum((each.chunked_prefill_size, each.max_running_requests) == (256, 16) for each in found) >= 95


def test_a_gain_within_what_the_default_itself_differs_by_is_none() -> None:
    verdict = judge([Pair(100, 104), Pair(96, 101), Pair(103, 108), Pair(99, 104), Pair(101, 105)])
    assert not verdict.accepted
    assert verdict.noise == pytest.approx(0.07)
    assert "no more than the default's own rounds differ by (7.0%)" in verdict.reason


def test_what_is_worse_side_by_side_is_told_as_that() -> None:
    assert judge([Pair(100, 80)] * 5).reason.startswith("its gain is -20.0%, no more than")


def test_two_lost_rounds_of_five_are_too_many() -> None:
    verdict = judge([Pair(100, 150), Pair(100, 99), Pair(100, 160), Pair(100, 99), Pair(100, 170)])
    assert not verdict.accepted
    assert "did not win 2 of 5 rounds" in verdict.reason


def test_fewer_rounds_than_prove_anything_prove_nothing() -> None:
    assert not judge([Pair(1, 10)] * (LEAST_ROUNDS - 1)).accepted
    assert judge([Pair(1, 10)] * LEAST_ROUNDS).accepted


def test_a_faster_first_token_is_no_gain_where_tokens_per_second_fall() -> None:
    paid = judge([Pair(10, 20, 100, 90)] * 5)
    assert not paid.accepted
    assert "90.0% of the default's" in paid.reason
    assert judge([Pair(10, 20, 100, 100)] * 5).accepted


def test_a_default_that_meets_no_bound_at_all_is_beaten_by_one_that_does() -> None:
    verdict = judge([Pair(0, 3)] * 5)
    assert verdict.accepted
    assert math.isinf(verdict.gain)
    assert not judge([Pair(0, 0)] * 5).accepted
