"""Which setting to measure next, as a pure function of what was measured.

The default comes first, last, and between others: every score is read against the default's near it, so that
a machine that grows slower meets all alike. First a survey (the whole grid where it is small, else points
that cover it), then the best one's neighbours, then the best third again, and their best third twice more.
"""

from __future__ import annotations

import bisect
import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from meshkit.cli.tuning.space import DEFAULT, Axes, Setting, arrange, candidates, neighbours

DEFAULT_EVERY = 4
"""So many trials between two of the default."""
SURVEY_SHARE = 0.5
"""Of all trials, where the grid is larger than that."""
REPEATS = 6
"""Trials that climbing leaves for measuring the best again."""
REACH = 0.75
"""What scored less than this share of the best is not measured again."""
LEAST_FLOOR = 0.95
"""A setting whose floor is below so much of the default's is out."""


@dataclass(frozen=True)
class Trial:
    """What came of one run. score: greater is better; None: it failed.

    floor: a figure that must not fall below the default's; None: there is none.
    """

    setting: Setting
    score: float | None
    floor: float | None = None


@dataclass(frozen=True)
class Plan:
    """The grid, and what of it is measured first, in order."""

    axes: Axes
    survey: tuple[Setting, ...]


def make_plan(axes: Axes, *, room: int) -> Plan:
    """room: trials that fit into the time."""
    everything = candidates(axes)
    count = len(everything) if len(everything) <= room * SURVEY_SHARE else int(room * SURVEY_SHARE)
    return Plan(axes, tuple(arrange(everything[:count])))


def next_trial(plan: Plan, done: Sequence[Trial], *, room: int) -> Setting | None:
    """The setting to measure now; None: the search is over. room: trials that fit into what time is left."""
    if not done:
        return DEFAULT
    if room < 1:
        return None
    if _since_default(done) >= DEFAULT_EVERY:
        return DEFAULT
    # The last one is the default's: it has to be on both sides of all others.
    wanted = _candidate(plan, done, room=room) if room > 1 else None
    return DEFAULT if wanted is None and done[-1].setting != DEFAULT else wanted


def count_ahead(plan: Plan, done: Sequence[Trial], *, room: int) -> int:
    """How many trials the search would still make if all were as good as the default."""
    trials = list(done)
    while room > 0 and (setting := next_trial(plan, trials, room=room)) is not None:
        trials.append(Trial(setting, 1.0))
        room -= 1
    return len(trials) - len(done)


def adjust(done: Sequence[Trial]) -> dict[Setting, float]:
    """Median score of each setting that can be chosen, at the default's usual pace.

    A score counts as it stands where the default near it scored nothing.
    """
    scores: dict[Setting, list[float]] = {}
    floors: dict[Setting, list[float]] = {}
    score_line = _DefaultLine(done, lambda trial: trial.score)
    floor_line = _DefaultLine(done, lambda trial: trial.floor)
    usual = statistics.median(scores_of(done, DEFAULT) or [0.0])
    for index, trial in enumerate(done):
        if trial.score is None:
            continue
        near, near_floor = score_line.at(index), floor_line.at(index)
        scores.setdefault(trial.setting, []).append(trial.score * usual / near if near else trial.score)
        if trial.floor is not None and near_floor:
            floors.setdefault(trial.setting, []).append(trial.floor / near_floor)
    failed = {trial.setting for trial in done if trial.score is None}
    low = {each for each, shares in floors.items() if statistics.median(shares) < LEAST_FLOOR}
    return {each: statistics.median(of) for each, of in scores.items() if each not in failed | low}


def leader(done: Sequence[Trial]) -> Setting:
    """The setting that scored best; the default unless another one is above it."""
    adjusted = adjust(done)
    best = max(adjusted, key=lambda each: (adjusted[each], each == DEFAULT), default=DEFAULT)
    return best if adjusted.get(best, 0.0) > adjusted.get(DEFAULT, 0.0) else DEFAULT


def scores_of(done: Iterable[Trial], setting: Setting) -> list[float]:
    """Of its runs that did not fail, in order."""
    return [trial.score for trial in done if trial.setting == setting and trial.score is not None]


def _since_default(done: Sequence[Trial]) -> int:
    return next(index for index, trial in enumerate(reversed(done)) if trial.setting == DEFAULT)


def _candidate(plan: Plan, done: Sequence[Trial], *, room: int) -> Setting | None:
    return _survey(plan, done) or _climb(plan, done, room=room) or _repeat(done)


def _survey(plan: Plan, done: Sequence[Trial]) -> Setting | None:
    tried = {trial.setting for trial in done}
    return next((setting for setting in plan.survey if setting not in tried), None)


def _climb(plan: Plan, done: Sequence[Trial], *, room: int) -> Setting | None:
    """A neighbour of the best one that nobody has tried, while there is time to measure the best again."""
    if room <= REPEATS:
        return None
    tried = {trial.setting for trial in done}
    near = neighbours(plan.axes, leader(done))
    return next((setting for setting in near if setting not in tried), None)


def _repeat(done: Sequence[Trial]) -> Setting | None:
    """Of the best third the first with a single run, of their best third the first with less than 4, ..."""
    adjusted = adjust(done)
    within = REACH * max(adjusted.values(), default=0.0)
    ranked = sorted(
        (each for each, score in adjusted.items() if each != DEFAULT and score >= within),
        key=lambda each: -adjusted[each],
    )
    runs = {setting: len(scores_of(done, setting)) for setting in ranked}
    wanted, keep = 2, len(ranked)
    while keep > 1:
        keep = max(2, math.ceil(keep / 3))
        few = next((setting for setting in arrange(ranked[:keep]) if runs[setting] < wanted), None)
        if few is not None or keep == 2:
            return few
        wanted = 2 * wanted
    return None


class _DefaultLine:
    """The default's values over the places of a search: straight between two of its runs, level beyond."""

    def __init__(self, done: Sequence[Trial], value: Callable[[Trial], float | None]) -> None:
        known = [(at, value(trial)) for at, trial in enumerate(done) if trial.setting == DEFAULT]
        self._places = [at for at, found in known if found is not None]
        self._values = [found for _, found in known if found is not None]

    def at(self, place: int) -> float | None:
        """None where the default has no value at all."""
        if not self._places:
            return None
        after = bisect.bisect_left(self._places, place)
        if after == len(self._places):
            return self._values[-1]
        if after == 0 or self._places[after] == place:
            return self._values[after]
        begin, end = self._places[after - 1], self._places[after]
        first, last = self._values[after - 1], self._values[after]
        return first + (last - first) * (place - begin) / (end - begin)
