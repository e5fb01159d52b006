"""Whether a setting is better than the default: both measured side by side, in turns. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

LEAST_ROUNDS = 4
"""Fewer prove nothing."""
LOST_ROUNDS = 1
"""So many of five or more rounds may be lost by the better one."""
MOST_BELOW = 0.05
"""Of the floor, however noisy the machine is."""


@dataclass(frozen=True)
class Pair:
    """One round: what the default and the other one scored; greater is better. floors: as in Trial."""

    default: float
    other: float
    default_floor: float | None = None
    other_floor: float | None = None


@dataclass(frozen=True)
class Verdict:
    """gain: of the other one over the default, 0.1 is a tenth. noise: by how much of their median the
    default's own rounds differ. reason: for people.
    """

    accepted: bool
    gain: float
    noise: float
    reason: str


def judge(rounds: Sequence[Pair]) -> Verdict:
    """Accepts the other one only where it gains more than the default's own rounds differ by, wins nearly all
    rounds, and leaves the floor where it was.
    """
    if len(rounds) < LEAST_ROUNDS:
        return Verdict(
            False,
            0.0,
            0.0,
            f"only {len(rounds)} rounds were measured side by side, {LEAST_ROUNDS} are needed",
        )
    gain = _gain(rounds)
    noise = spread([pair.default for pair in rounds])
    reason = _objection(rounds, gain=gain, noise=noise)
    if reason:
        return Verdict(False, gain, noise, reason)
    return Verdict(
        True, gain, noise, f"it gains {gain:.1%}, and the default's own rounds differ by {noise:.1%}"
    )


def spread(values: Sequence[float]) -> float:
    """Largest minus smallest, as a share of the median; 0 where that is 0."""
    middle = statistics.median(values)
    return (max(values) - min(values)) / middle if middle else 0.0


def _objection(rounds: Sequence[Pair], *, gain: float, noise: float) -> str:
    """Why the other one is not taken; empty: it is."""
    lost = sum(pair.other <= pair.default for pair in rounds)
    if gain <= noise:
        return f"its gain is {gain:+.1%}, no more than the default's own rounds differ by ({noise:.1%})"
    if lost > (LOST_ROUNDS if len(rounds) > LEAST_ROUNDS else 0):
        return f"it gains {gain:.1%} in the median, but did not win {lost} of {len(rounds)} rounds"
    return _floor_objection(rounds)


def _floor_objection(rounds: Sequence[Pair]) -> str:
    floors = [
        (pair.default_floor, pair.other_floor)
        for pair in rounds
        if pair.default_floor and pair.other_floor is not None
    ]
    if not floors:
        return ""
    share = statistics.median(other / default for default, other in floors)
    allowed = min(MOST_BELOW, spread([default for default, _ in floors]))
    if share < 1 - allowed:
        return f"its output tokens/s are {share:.1%} of the default's"
    return ""


def _gain(rounds: Sequence[Pair]) -> float:
    """The smaller of two readings: of the rounds, in which both met the same machine, and of the medians."""
    default = statistics.median(pair.default for pair in rounds)
    other = statistics.median(pair.other for pair in rounds)
    by_round = statistics.median(_ratio(pair.other, pair.default) for pair in rounds)
    return min(by_round, _ratio(other, default)) - 1


def _ratio(other: float, default: float) -> float:
    """A default that scored nothing is beaten beyond measure by anything."""
    if default > 0:
        return other / default
    return float("inf") if other > 0 else 1.0
