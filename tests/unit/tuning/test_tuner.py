"""The search in its time: no run begins that would end after it, and there is time for the rounds."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from meshkit.cli.tuning.objective import Objective
from meshkit.cli.tuning.space import DEFAULT, Axes, Setting, candidates
from meshkit.cli.tuning.tuner import Outcome, Run, Tuner
from meshkit.errors import FailedPrecondition
from tests.unit.tuning.machines import AXES, Score, flat, peaked


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class Watched:
    """What a display was told."""

    def __init__(self) -> None:
        self.left_s: list[float] = []
        self.best: list[Setting] = []

    def begin(self, phase: str, setting: Setting, *, trials_ahead: int, left_s: float) -> None:
        del phase, setting
        assert trials_ahead >= 0
        self.left_s.append(left_s)

    def end(self, run: Run, *, best: Setting) -> None:
        assert run.took_s > 0
        self.best.append(best)


def report(score: float, **other: Any) -> dict[str, Any]:
    return {"output_tokens_per_s": score, "failed": 0, "requests": 8, "errors": {}, **other}


def tune(
    score: Score, *, budget_s: float, axes: Axes = AXES, start_s: Callable[[Setting], float] = lambda _: 0.0
) -> tuple[Outcome, Clock, Watched]:
    """A run takes 2 s, and what its setting's start takes."""
    clock, watched = Clock(), Watched()

    def measure(setting: Setting) -> dict[str, Any]:
        clock.now_s += 2.0 + start_s(setting)
        return report(score(setting))

    tuner = Tuner(
        measure, objective=Objective.THROUGHPUT, rounds=5, budget_s=budget_s, watcher=watched, now=clock
    )
    return tuner.run(lambda: axes), clock, watched


@pytest.mark.parametrize("budget_s", [25.0, 50.0, 120.0])
def test_it_ends_in_its_time_with_all_rounds_measured(budget_s: float) -> None:
    outcome, clock, watched = tune(peaked, budget_s=budget_s)
    assert clock.now_s <= 100.0 + budget_s
    assert len(outcome.rounds) in (0, 5)
    assert not outcome.rounds or watched.left_s[-1] <= 2.0
    assert all(left <= budget_s for left in watched.left_s)
    if budget_s >= 100:
        assert outcome.chosen.chunked_prefill_size == 256
        assert watched.best[-1] == outcome.chosen


def test_a_start_that_takes_long_is_no_reason_to_end_the_search() -> None:
    started: set[Setting] = set()

    def start_s(setting: Setting) -> float:
        first = not started and setting != DEFAULT
        started.add(setting)
        return 20.0 if first else 0.0

    outcome, _, _ = tune(peaked, budget_s=120.0, axes=Axes((64, None, 256)), start_s=start_s)
    assert {run.setting for run in outcome.runs} == {DEFAULT, *candidates(Axes((64, None, 256)))}
    assert outcome.chosen == Setting(256)


def test_a_budget_for_nothing_leaves_the_default_and_says_what_to_give() -> None:
    outcome, _, _ = tune(peaked, budget_s=5.0)
    assert outcome.chosen == DEFAULT
    assert "--budget" in outcome.verdict.reason


def test_nothing_to_try_is_said() -> None:
    outcome, _, _ = tune(flat, budget_s=100.0, axes=Axes())
    assert "there is nothing to try" in outcome.verdict.reason


def test_rounds_are_taken_in_turns() -> None:
    outcome, _, _ = tune(peaked, budget_s=50.0)
    order = [run.setting == DEFAULT for run in outcome.runs if run.phase == "confirm"]
    assert order == [True, False, False, True, True, False, False, True, True, False]


def test_a_default_whose_requests_fail_ends_it() -> None:
    tuner = Tuner(
        lambda _: report(1.0, failed=2),
        objective=Objective.THROUGHPUT,
        rounds=5,
        budget_s=9.0,
        watcher=Watched(),
    )
    with pytest.raises(FailedPrecondition, match="2 of 8 requests failed"):
        tuner.run(lambda: AXES)
