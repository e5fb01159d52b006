"""The report of a scenario: percentiles, the target beside them, and the verdict. No I/O, no clock."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from chaos.history import Faults


@dataclass(frozen=True)
class Target:
    """Bounds of the scoreboard in milliseconds at the 99th percentile; None: there is none.

    figures: upper bounds of the scenario's own figures, at their largest.
    """

    detection_ms: float | None = None
    gap_ms: float | None = None
    figures: Mapping[str, float] = field(default_factory=dict)

    def describe(self) -> dict[str, float]:
        """What is bounded, by the name of its figure."""
        given = {"detection_ms": self.detection_ms, "gap_ms": self.gap_ms, **self.figures}
        return {name: bound for name, bound in given.items() if bound is not None}


@dataclass
class Outcome:
    """What one run, or several together, gave. Times in milliseconds.

    problems: in words, whatever else must not be: a fault that did not happen, a mesh that did not recover.
    """

    runs: int = 0
    streams: int = 0
    faults_injected: int = 0
    faults: Faults = field(default_factory=Faults)
    leaked_pages: int = 0
    detection_ms: list[float] = field(default_factory=list)
    gap_ms: list[float] = field(default_factory=list)
    figures: dict[str, list[float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def add(self, other: Outcome) -> None:
        """Take another run in."""
        self.runs += other.runs
        self.streams += other.streams
        self.faults_injected += other.faults_injected
        self.faults += other.faults
        self.leaked_pages += other.leaked_pages
        self.detection_ms += other.detection_ms
        self.gap_ms += other.gap_ms
        self.problems += other.problems
        for name, values in other.figures.items():
            self.figures.setdefault(name, []).extend(values)

    @property
    def clean(self) -> bool:
        """Nothing lost, nothing leaked, every fault truly injected, no problem."""
        return not (self.faults.any or self.leaked_pages or self.problems) and self.faults_injected > 0


def percentiles(values: Sequence[float]) -> dict[str, float] | None:
    """p50, p99 (nearest rank) and max, rounded to 0.1; None of nothing."""
    if not values:
        return None
    ordered = sorted(values)

    def at(share: float) -> float:
        return round(ordered[min(len(ordered) - 1, int(share * len(ordered)))], 1)

    return {"p50": at(0.50), "p99": at(0.99), "max": round(ordered[-1], 1)}


def within(outcome: Outcome, target: Target) -> bool:
    """Whether every bound holds; a bounded figure that was never measured is outside."""
    measured = [
        (target.detection_ms, _p99(outcome.detection_ms)),
        (target.gap_ms, _p99(outcome.gap_ms)),
        *(
            (bound, max(outcome.figures.get(name, []), default=None))
            for name, bound in target.figures.items()
        ),
    ]
    return all(bound is None or (value is not None and value <= bound) for bound, value in measured)


def _p99(values: Sequence[float]) -> float | None:
    summary = percentiles(values)
    return None if summary is None else summary["p99"]


def summarise(outcome: Outcome, target: Target) -> dict[str, Any]:
    """The JSON part of a scenario, or of one of its variants, that comes of its runs."""
    return {
        "runs": outcome.runs,
        "streams": outcome.streams,
        "faults_injected": outcome.faults_injected,
        **dataclasses.asdict(outcome.faults),
        "leaked_pages": outcome.leaked_pages,
        "detection_ms": percentiles(outcome.detection_ms),
        "gap_ms": percentiles(outcome.gap_ms),
        "target": target.describe(),
        "within_target": within(outcome, target),
        "figures": {name: percentiles(values) for name, values in outcome.figures.items()},
        "problems": outcome.problems,
    }
