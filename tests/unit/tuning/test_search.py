"""The search: the default first, last and between; drift takes nobody's side; the best is measured again."""

from __future__ import annotations

from itertools import pairwise

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from meshkit.cli.tuning.search import (
    DEFAULT_EVERY,
    Trial,
    adjust,
    count_ahead,
    leader,
    make_plan,
    next_trial,
    scores_of,
)
from meshkit.cli.tuning.space import DEFAULT, Axes, Setting, candidates
from tests.unit.tuning.machines import AXES, Machine, flat, peaked

seeds = st.integers(0, 2**32)


@given(seeds, st.integers(1, 60), st.sampled_from([0.0, 0.05]))
@settings(max_examples=30, deadline=None)
def test_the_default_is_first_last_and_never_long_ago(seed: int, room: int, noise: float) -> None:
    trials = Machine(peaked, seed, noise=noise).search(room=room)
    places = [index for index, trial in enumerate(trials) if trial.setting == DEFAULT]
    assert places[0] == 0
    assert places[-1] == len(trials) - 1
    assert all(after - before <= DEFAULT_EVERY + 1 for before, after in pairwise(places))
    assert len(trials) <= room


@given(seeds)
@settings(max_examples=10, deadline=None)
def test_the_best_of_a_grid_that_fits_is_found_and_measured_again(seed: int) -> None:
    trials = Machine(peaked, seed, noise=0.01).search(room=120)
    assert {trial.setting for trial in trials} == {DEFAULT, *candidates(AXES)}
    best = leader(trials)
    assert (best.chunked_prefill_size, best.max_running_requests) == (256, 16)
    assert len(scores_of(trials, best)) >= 3


@given(seeds)
@settings(max_examples=10, deadline=None)
def test_a_grid_that_does_not_fit_is_climbed_from_a_part_that_covers_it(seed: int) -> None:
    trials = Machine(peaked, seed, noise=0.01).search(room=26)
    assert len({trial.setting for trial in trials}) < len(candidates(AXES))
    best = leader(trials)
    assert (best.chunked_prefill_size, best.max_running_requests) == (256, 16)


@given(seeds, st.sampled_from([-0.8, 0.5]))
@settings(max_examples=20, deadline=None)
def test_a_machine_that_changes_its_pace_does_not_change_who_leads(seed: int, drift: float) -> None:
    best = leader(Machine(peaked, seed, drift=drift).search(room=60))
    assert (best.chunked_prefill_size, best.max_running_requests) == (256, 16)


def test_a_score_is_read_against_the_default_beside_it() -> None:
    other = Setting(256)
    # The machine halves its pace: 60 at the end is more than 100 at the beginning.
    trials = [Trial(DEFAULT, 100.0), Trial(other, 90.0), Trial(DEFAULT, 50.0)]
    assert adjust(trials)[other] == pytest.approx(90.0)
    late = [Trial(DEFAULT, 100.0), Trial(DEFAULT, 50.0), Trial(other, 60.0), Trial(DEFAULT, 50.0)]
    assert adjust(late)[other] == pytest.approx(60.0)
    assert leader(late) == other
    assert leader([*late[:2], Trial(other, 49.0), late[3]]) == DEFAULT


def test_a_setting_that_failed_once_is_never_the_best() -> None:
    other = Setting(256)
    trials = [Trial(DEFAULT, 1.0), Trial(other, 9.0), Trial(other, None), Trial(DEFAULT, 1.0)]
    assert leader(trials) == DEFAULT


def test_a_setting_that_costs_more_of_the_floor_than_is_allowed_is_never_the_best() -> None:
    low, fair = Setting(256), Setting(64)
    trials = [
        Trial(DEFAULT, 1.0, 100.0), Trial(low, 9.0, 90.0), Trial(fair, 2.0, 99.0), Trial(DEFAULT, 1.0, 100.0),
    ]  # fmt: skip
    assert leader(trials) == fair


def test_of_equals_the_default_leads() -> None:
    assert leader(Machine(flat, 0).search()) == DEFAULT


def test_where_there_is_nothing_to_try_only_the_default_is_measured() -> None:
    assert [trial.setting for trial in Machine(flat, 0).search(Axes())] == [DEFAULT]


def test_the_same_results_make_the_same_search() -> None:
    assert Machine(peaked, 7, noise=0.1).search() == Machine(peaked, 7, noise=0.1).search()


def test_what_is_ahead_is_what_is_made_then() -> None:
    plan = make_plan(AXES, room=40)
    trials = Machine(flat, 0).search(room=40)
    assert count_ahead(plan, [], room=40) == len(trials)
    assert next_trial(plan, trials, room=0) is None
