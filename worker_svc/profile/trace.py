"""A recording as a trace in Chrome's JSON format, which ui.perfetto.dev and chrome://tracing open.

Lanes: steps, gaps between them (the device waits for a plan), one for each class of operators, and more for
collectives that are under way at the same time. Times are microseconds from the beginning of the recording.
The member `chipmesh` has the sums.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from itertools import zip_longest
from typing import Any

from plugins.sdk.timing import CLASSES, COMMUNICATION, OperatorRun
from worker_svc.profile.communication import Communication, communication_by_step
from worker_svc.profile.recorder import Recording, StepRecord

_STEPS, _GAPS, _FIRST_CLASS = 1, 2, 3
_LANES = ("steps", "gaps", *CLASSES)
_TITLE = ("worker", "group", "model", "chip")
_PAUSE_EVERY = 64
"""Events; in between the device thread gets its turn, as a step is not to wait for this."""


def write_trace(recording: Recording, summary: Mapping[str, Any]) -> bytes:
    """The trace as JSON. summary: its sums, and what is known of the executor."""
    parts = []
    for number, event in enumerate(_events(recording, summary)):
        parts.append(json.dumps(event, separators=(",", ":")))
        if number % _PAUSE_EVERY == 0:
            time.sleep(0)
    head = json.dumps({"displayTimeUnit": "ms", "chipmesh": summary}, separators=(",", ":"))
    return f'{head[:-1]},"traceEvents":[{",".join(parts)}]}}'.encode()


def _events(recording: Recording, summary: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    known = [str(summary[name]) for name in _TITLE if name in summary]
    title = " ".join(["chipmesh executor", *known])
    yield _name("process_name", 0, title)
    runs = list(_on_lanes(recording.times.runs if recording.times is not None else ()))
    more = max((lane for lane, _ in runs), default=0) - len(_LANES)
    lanes = (*_LANES, *(f"{COMMUNICATION} {number}" for number in range(2, 2 + more)))
    for number, lane in enumerate(lanes, start=1):
        yield _name("thread_name", number, lane)
        yield {**_place(number), "ph": "M", "name": "thread_sort_index", "args": {"sort_index": number}}
    origin = recording.begin_s
    by_step = communication_by_step(recording)
    for step, communication in zip_longest(recording.steps, by_step):
        yield _step(step, origin, communication)
    yield from _gaps(recording)
    yield from (_run(run, origin, lane) for lane, run in runs)


def _on_lanes(runs: Iterable[OperatorRun]) -> Iterator[tuple[int, OperatorRun]]:
    """Each run with its lane: its class', or for a collective the first one that is free."""
    first = _FIRST_CLASS + CLASSES.index(COMMUNICATION)
    free_at: list[float] = []
    """Of `first` and the lanes beyond the classes, when the last collective on it ended."""
    for run in runs:
        if run.operator.kind != COMMUNICATION:
            yield _FIRST_CLASS + CLASSES.index(run.operator.kind), run
            continue
        place = next((place for place, end in enumerate(free_at) if end <= run.begin_s), len(free_at))
        free_at[place : place + 1] = [run.begin_s + run.seconds]
        yield (len(_LANES) + place if place else first), run


def _step(step: StepRecord, origin: float, communication: Communication | None) -> dict[str, Any]:
    kind = "prefill" if step.prefill_tokens else "decode"
    if step.prefill_tokens and step.sampled_tokens > 1:
        kind = "mixed"
    return {
        **_place(_STEPS),
        **_span(step.begin_s - origin, step.seconds),
        "name": f"{kind} step",
        "cat": "step",
        "args": {
            "step_seq": step.step_seq,
            "prefill_tokens": step.prefill_tokens,
            "sampled_tokens": step.sampled_tokens,
            **({"communication": communication.to_json()} if communication is not None else {}),
        },
    }


def _gaps(recording: Recording) -> Iterable[dict[str, Any]]:
    """Where no step ran; after the last one that is told, only where it is the last."""
    at = recording.begin_s
    ends = [(step.begin_s, step.begin_s + step.seconds) for step in recording.steps]
    if len(recording.steps) == recording.step_count:
        ends.append((recording.end_s, recording.end_s))
    for begin, end in ends:
        if begin > at:
            yield {
                **_place(_GAPS),
                **_span(at - recording.begin_s, begin - at),
                "name": "idle",
                "cat": "gap",
                "args": {},
            }
        at = end


def _run(run: OperatorRun, origin: float, lane: int) -> dict[str, Any]:
    operator = run.operator
    carried = {"size_bytes": run.size_bytes, "waited_us": round(run.held_s * 1e6, 3)}
    return {
        **_place(lane),
        **_span(run.begin_s - origin, run.seconds),
        "name": operator.name,
        "cat": operator.kind,
        "args": {
            "native": operator.native,
            "program": operator.program,
            **(carried if operator.kind == COMMUNICATION else {}),
        },
    }


def _place(lane: int) -> dict[str, Any]:
    return {"pid": os.getpid(), "tid": lane}


def _span(begin_s: float, seconds: float) -> dict[str, Any]:
    return {"ph": "X", "ts": round(begin_s * 1e6, 3), "dur": round(max(0.0, seconds) * 1e6, 3)}


def _name(kind: str, lane: int, name: str) -> dict[str, Any]:
    return {**_place(lane), "ph": "M", "name": kind, "args": {"name": name}}
