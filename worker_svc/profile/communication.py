"""What ranks say to each other within steps: how long it was under way, behind computing, and waited for."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from plugins.sdk.timing import COMMUNICATION, OperatorRun
from worker_svc.profile.recorder import Recording

Interval = tuple[float, float]


@dataclass(frozen=True, slots=True)
class Communication:
    """Of some runs. size_bytes: of this rank's inputs.

    seconds: in which any collective was under way. overlapped_s: of these, those in which another operator
    ran. waited_s: for which collectives held the step.
    """

    calls: int = 0
    size_bytes: int = 0
    seconds: float = 0.0
    overlapped_s: float = 0.0
    waited_s: float = 0.0

    def to_json(self) -> dict[str, Any]:
        """As the summary and the trace have it."""
        return {
            "calls": self.calls,
            "size_bytes": self.size_bytes,
            "seconds": self.seconds,
            "overlapped_s": self.overlapped_s,
            "waited_s": self.waited_s,
        }


def communication_of(runs: Iterable[OperatorRun]) -> Communication:
    """Of all the collectives among `runs`, beside all the other operators."""
    collectives: list[OperatorRun] = []
    others: list[Interval] = []
    for run in runs:
        if run.operator.kind == COMMUNICATION:
            collectives.append(run)
        else:
            others.append((run.begin_s, run.begin_s + run.seconds))
    spans = [(run.begin_s, run.begin_s + run.seconds) for run in collectives]
    return Communication(
        calls=len(collectives),
        size_bytes=sum(run.size_bytes for run in collectives),
        seconds=sum(end - begin for begin, end in _merged(spans)),
        overlapped_s=overlap_s(spans, others) if spans else 0.0,
        waited_s=sum(run.held_s for run in collectives),
    )


def communication_by_step(recording: Recording) -> list[Communication]:
    """Of the first steps, as far as all their runs are told one by one; none where no collective ran."""
    runs = recording.times.runs if recording.times is not None else ()
    if not any(run.operator.kind == COMMUNICATION for run in runs):
        return []
    begins = [step.begin_s for step in recording.steps]
    by_step: list[list[OperatorRun]] = [[] for _ in begins]
    for run in runs:
        place = bisect_right(begins, run.begin_s) - 1
        if place >= 0:
            by_step[place].append(run)
    return [communication_of(own) for own in by_step[: _told_whole(recording, runs, begins)]]


def overlap_s(first: Iterable[Interval], second: Iterable[Interval]) -> float:
    """Seconds in which an interval of each is under way."""
    edges = [
        (at, step, side)
        for side, intervals in enumerate((_merged(first), _merged(second)))
        for begin, end in intervals
        for at, step in ((begin, 1), (end, -1))
    ]
    open_count, since, total = [0, 0], 0.0, 0.0
    for at, step, side in sorted(edges):
        if all(open_count):
            total += at - since
        open_count[side] += step
        since = at
    return total


def _told_whole(recording: Recording, runs: Sequence[OperatorRun], begins: Sequence[float]) -> int:
    """How many steps have all their runs among those that were told, collectives as well as operators."""
    count = len(begins)
    for is_communication in (True, False):
        told = [run for run in runs if (run.operator.kind == COMMUNICATION) is is_communication]
        if told and len(told) < _calls(recording, is_communication=is_communication):
            count = min(count, bisect_right(begins, max(run.begin_s for run in told)) - 1)
    return count


def _calls(recording: Recording, *, is_communication: bool) -> int:
    totals = recording.times.totals if recording.times is not None else ()
    return sum(each.calls for each in totals if (each.operator.kind == COMMUNICATION) is is_communication)


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    made: list[Interval] = []
    for begin, end in sorted(intervals):
        if made and begin <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], end))
        else:
            made.append((begin, end))
    return made
