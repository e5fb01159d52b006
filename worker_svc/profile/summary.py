"""The sums of a recording: time by operator and by class, idle time, overlap, and what is not known."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plugins.sdk.timing import CLASSES, COMMUNICATION, SAMPLING, OperatorTotal, TimedOperator
from worker_svc.profile.communication import communication_by_step, communication_of
from worker_svc.profile.recorder import Recording

HOST = "host"
"""Time of steps in no operator: the executor's own, between plan and device and back."""
_GRAMMAR = TimedOperator("grammar masks", SAMPLING, native=True, program="llguidance")
_NO_INSIDE = "this plugin tells nothing of the inside of its steps: they are timed as a whole"
_NO_COMMUNICATION = "no collective ran within a step, so there is no communication to overlap with"


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
        "communication": _communication(recording),
        "notes": _notes(recording),
    }


def _totals(recording: Recording) -> list[OperatorTotal]:
    """Operators of one name, class and program together: the layers of a model are one line."""
    sums: dict[TimedOperator, OperatorTotal] = {}
    for total in recording.times.totals if recording.times is not None else ():
        known = sums.get(total.operator, OperatorTotal(total.operator, 0, 0.0))
        sums[total.operator] = OperatorTotal(
            total.operator,
            known.calls + total.calls,
            known.seconds + total.seconds,
            known.size_bytes + total.size_bytes,
        )
    if recording.constraint_s and recording.times is not None:
        sums[_GRAMMAR] = OperatorTotal(_GRAMMAR, recording.step_count, recording.constraint_s)
    return list(sums.values())


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
        **({"size_bytes": total.size_bytes} if operator.kind == COMMUNICATION else {}),
    }


def _heaviest_first(totals: Sequence[OperatorTotal]) -> list[OperatorTotal]:
    return sorted(totals, key=lambda total: -total.seconds)


def _communication(recording: Recording) -> dict[str, Any]:
    """Of the runs that were told one by one; per_step: means over the steps that they make up."""
    whole = communication_of(recording.times.runs if recording.times is not None else ())
    by_step = communication_by_step(recording)
    count = max(len(by_step), 1)
    return {
        **whole.to_json(),
        "overlap_share": _share(whole.overlapped_s, whole.seconds),
        "per_step": {
            "steps": len(by_step),
            "seconds": sum(each.seconds for each in by_step) / count,
            "overlapped_s": sum(each.overlapped_s for each in by_step) / count,
            "waited_s": sum(each.waited_s for each in by_step) / count,
        },
    }


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
