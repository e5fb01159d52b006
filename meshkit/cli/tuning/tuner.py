"""Runs a search within a time: measures what `search` asks for, then the best beside the default in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

from meshkit.cli.tuning.objective import Objective
from meshkit.cli.tuning.search import Plan, Trial, count_ahead, leader, make_plan, next_trial
from meshkit.cli.tuning.space import DEFAULT, Axes, Setting
from meshkit.cli.tuning.verdict import Pair, Verdict, judge
from meshkit.errors import FailedPrecondition, MeshError

Report = Mapping[str, Any]
Measure = Callable[[Setting], Report]
"""Applies a setting, runs the load once and returns the figures of `describe_samples`. MeshError: it cannot
be applied, or the load not be run."""

FIRST_GUESS_S = 1.0
"""Of a trial, before there was one."""


class Watcher(Protocol):
    """Who shows what goes on. trials_ahead: at most, as it looks now."""

    def begin(self, phase: str, setting: Setting, *, trials_ahead: int, left_s: float) -> None:
        """A run begins; the whole is over in left_s or less."""
        ...

    def end(self, run: Run, *, best: Setting) -> None:
        """It is over."""
        ...


@dataclass(frozen=True)
class Run:
    """One run. phase: "search" or "confirm". report: None where it failed, with `error`."""

    phase: str
    setting: Setting
    took_s: float
    report: Report | None
    error: str = ""


@dataclass
class Outcome:
    """What came of it. chosen: the default unless another one was proven better."""

    runs: list[Run] = field(default_factory=list)
    best: Setting = DEFAULT
    """Of the search, before it was measured beside the default."""
    rounds: list[Pair] = field(default_factory=list)
    verdict: Verdict = field(default_factory=lambda: Verdict(False, 0.0, 0.0, "nothing was measured"))

    @property
    def chosen(self) -> Setting:
        """What to write."""
        return self.best if self.verdict.accepted else DEFAULT


class Tuner:
    """One search. rounds: side by side at the end. budget_s: no run begins that would end after it, by the
    time that runs took so far; now: seconds, any origin.
    """

    def __init__(
        self,
        measure: Measure,
        *,
        objective: Objective,
        rounds: int,
        budget_s: float,
        watcher: Watcher,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._measure = measure
        self._objective = objective
        self._rounds = rounds
        self._watcher = watcher
        self._now = now
        self._end_s = now() + budget_s
        self._trials: list[Trial] = []
        self.outcome = Outcome()

    def run(self, axes: Callable[[], Axes]) -> Outcome:
        """axes: asked once the default was measured, which needs a mesh.

        Raises:
            MeshError: the default itself cannot be measured.
        """
        self._search_once(DEFAULT, ahead=0)
        grid = axes()
        plan = make_plan(grid, room=self._room(grid))
        while (setting := next_trial(plan, self._trials, room=self._room(grid))) is not None:
            self._search_once(setting, ahead=count_ahead(plan, self._trials, room=self._room(grid)))
        self._confirm(leader(self._trials), plan)
        return self.outcome

    def _search_once(self, setting: Setting, *, ahead: int) -> None:
        run = self._run("search", setting, ahead=ahead + 2 * self._rounds)
        if run.report is None:
            self._trials.append(Trial(setting, None))
        else:
            self._trials.append(
                Trial(setting, self._objective.score(run.report), self._objective.floor(run.report))
            )
        self._watcher.end(run, best=leader(self._trials))

    def _confirm(self, best: Setting, plan: Plan) -> None:
        outcome = self.outcome
        outcome.best = best
        if best == DEFAULT:
            outcome.verdict = Verdict(False, 0.0, 0.0, self._why_nothing(plan))
            return
        for number in range(self._rounds):
            if self._left_s() < 2 * self._typical_s() and number:
                break
            pair = self._measure_round(best, number)
            if pair is None:
                outcome.verdict = Verdict(False, 0.0, 0.0, f"a run failed: {outcome.runs[-1].error}")
                return
            outcome.rounds.append(pair)
        outcome.verdict = judge(outcome.rounds)

    def _measure_round(self, best: Setting, number: int) -> Pair | None:
        """Default and best, in an order that changes from round to round; None where a run failed."""
        reports: dict[Setting, Report] = {}
        for setting in (DEFAULT, best) if number % 2 == 0 else (best, DEFAULT):
            run = self._run("confirm", setting, ahead=2 * (self._rounds - number) - len(reports))
            self._watcher.end(run, best=best)
            if run.report is None:
                return None
            reports[setting] = run.report
        score, floor = self._objective.score, self._objective.floor
        default, other = reports[DEFAULT], reports[best]
        return Pair(score(default), score(other), floor(default), floor(other))

    def _run(self, phase: str, setting: Setting, *, ahead: int) -> Run:
        left_s = min(self._left_s(), ahead * self._typical_s())
        self._watcher.begin(phase, setting, trials_ahead=ahead, left_s=max(0.0, left_s))
        begun_s = self._now()
        try:
            report: Report | None = self._measure(setting)
            error = ""
        except MeshError as failure:
            if setting == DEFAULT:
                raise
            report, error = None, failure.message
        if report is not None and report["failed"]:
            error = f"{report['failed']} of {report['requests']} requests failed: {report['errors']}"
            if setting == DEFAULT:
                raise FailedPrecondition(f"the load fails on the default: {error}", reason="LOAD_FAILED")
            report = None
        run = Run(phase, setting, self._now() - begun_s, report, error)
        self.outcome.runs.append(run)
        return run

    def _left_s(self) -> float:
        return self._end_s - self._now()

    def _typical_s(self) -> float:
        """Of a run whose setting needs no start: those are fewer than half."""
        return statistics.median_low([run.took_s for run in self.outcome.runs] or [FIRST_GUESS_S])

    def _room(self, axes: Axes) -> int:
        """Runs that fit before those side by side, of which every second one changes the setting; that is a
        start, for which the longest run stands, where there are several windows.
        """
        change_s = self._typical_s()
        if len(axes.step_window_s) > 1:
            change_s = max(run.took_s for run in self.outcome.runs)
        reserved_s = self._rounds * (self._typical_s() + change_s)
        return max(0, int((self._left_s() - reserved_s) / self._typical_s()))

    def _why_nothing(self, plan: Plan) -> str:
        if not plan.survey:
            return (
                f"the time holds no trial beside the default and {self._rounds} rounds side by side; "
                "give more with --budget, or a shorter load with --num-prompts"
                if any(size > 1 for size in plan.axes.sizes)
                else "there is nothing to try: this load notices no other value"
            )
        return "no setting scored better"
