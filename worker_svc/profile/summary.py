"""The sums of a recording: time by operator and by class, idle time, overlap, and what is not known."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

from plugins.sdk.timing import CLASSES, COMMUNICATION, SAMPLING, OperatorTimes, OperatorTotal, TimedOperator
from worker_svc.profile.recorder import Recording

HOST = "host"
"""Time of steps in no operator: the executor's own, between plan and device and back."""
_GRAMMAR = TimedOperator("grammar masks", SAMPLING, native=True, program="llguidance")
_NO_INSIDE = "this plugin tells nothing of the inside of its steps: they are timed as a whole"
_NO_COMMUNICATION = "no collective ran within a step, so there is no communication to overlap with"

Interval = tuple[float, float]


def summarise(recording: Recording) -> dict[str, Any]:
    """Shares are of the time that steps took; idle_share is of the whole recording."""
    totals = _totals(recording)
    known_s = sum(total.seconds for total in totals)
    host_s = max(0.0, recording.step_s - known_s) if recording.times is not None else 0.0
    idle_s = max(0.0, recording.seconds - recording.step_s)
    return {
        "seconds": recording.seconds,
        "steps": recording.step_count,
        "step_s": recording.step_s,
        "idle_s": idle_s,
        "idle_share": _share(idle_s, recording.seconds),
        "prefill_tokens": recording.prefill_tokens,
        "sampled_tokens": recording.sampled_tokens,
        "classes": _by_class(totals, host_s, recording.step_s),
        "operators": [_operator(total, recording.step_s) for total in _heaviest_first(totals)],
        "communication": _overlap(recording.times),
        "notes": _notes(recording),
    }


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


def _merged(intervals: Iterable[Interval]) -> list[Interval]:
    made: list[Interval] = []
    for begin, end in sorted(intervals):
        if made and begin <= made[-1][1]:
            made[-1] = (made[-1][0], max(made[-1][1], end))
        else:
            made.append((begin, end))
    return made


def _totals(recording: Recording) -> list[OperatorTotal]:
    """Operators of one name, class and program together: the layers of a model are one line."""
    sums: dict[TimedOperator, list[float]] = defaultdict(lambda: [0, 0.0])
    for total in recording.times.totals if recording.times is not None else ():
        sums[total.operator][0] += total.calls
        sums[total.operator][1] += total.seconds
    if recording.constraint_s and recording.times is not None:
        sums[_GRAMMAR] = [recording.step_count, recording.constraint_s]
    return [OperatorTotal(each, int(calls), seconds) for each, (calls, seconds) in sums.items()]


def _by_class(totals: Sequence[OperatorTotal], host_s: float, step_s: float) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    for kind in CLASSES:
        own = [total for total in totals if total.operator.kind == kind]
        if own:
            seconds = sum(total.seconds for total in own)
            lines.append({
                "class": kind,
                "seconds": seconds,
                "share": _share(seconds, step_s),
                "calls": sum(total.calls for total in own),
                "native": all(total.operator.native for total in own),
                "programs": sorted({total.operator.program for total in own}),
            })  # fmt: skip
    if host_s:
        lines.append({
            "class": HOST, "seconds": host_s, "share": _share(host_s, step_s), "calls": None, "native": None,
            "programs": ["executor"],
        })  # fmt: skip
    return sorted(lines, key=lambda line: -line["seconds"])


def _operator(total: OperatorTotal, step_s: float) -> dict[str, Any]:
    operator = total.operator
    return {
        "operator": operator.name,
        "class": operator.kind,
        "seconds": total.seconds,
        "share": _share(total.seconds, step_s),
        "calls": total.calls,
        "native": operator.native,
        "program": operator.program,
    }


def _heaviest_first(totals: Sequence[OperatorTotal]) -> list[OperatorTotal]:
    return sorted(totals, key=lambda total: -total.seconds)


def _overlap(times: OperatorTimes | None) -> dict[str, float]:
    """Of the runs that were told one by one."""
    runs = times.runs if times is not None else ()
    spans = {
        is_communication: [
            (run.begin_s, run.begin_s + run.seconds)
            for run in runs
            if (run.operator.kind == COMMUNICATION) is is_communication
        ]
        for is_communication in (True, False)
    }
    seconds = sum(end - begin for begin, end in _merged(spans[True]))
    overlapped = overlap_s(spans[True], spans[False])
    return {"seconds": seconds, "overlapped_s": overlapped, "overlap_share": _share(overlapped, seconds)}


def _notes(recording: Recording) -> list[str]:
    times = recording.times
    if times is None:
        return [_NO_INSIDE]
    notes = list(times.notes)
    if not any(total.operator.kind == COMMUNICATION for total in times.totals):
        notes.append(_NO_COMMUNICATION)
    calls = sum(total.calls for total in times.totals)
    if calls > len(times.runs):
        notes.append(f"the first {len(times.runs)} of {calls} runs of operators are drawn; sums are of all")
    if recording.step_count > len(recording.steps):
        drawn = len(recording.steps)
        notes.append(f"the first {drawn} of {recording.step_count} steps are drawn; sums are of all")
    return notes


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0
