"""Takes down steps while a profile runs, in bounded memory; called on the device thread."""

from __future__ import annotations

from dataclasses import dataclass, field

from chipmesh.device.v1alpha1.execution_pb2 import StepPlan
from plugins.sdk.timing import OperatorTimes, StopTiming

MOST_STEPS = 10_000
"""Steps that are told one by one."""
MOST_RUNS = 20_000
"""Runs of operators that are told one by one: some hundred steps of a small model."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step. Times: seconds of the monotonic clock."""

    step_seq: int
    begin_s: float
    seconds: float
    prefill_tokens: int
    sampled_tokens: int


@dataclass
class Recording:
    """What was recorded between begin_s and end_s.

    steps: the first ones; counts and sums are of all. times: None where the plugin tells nothing of the
    inside of its steps.
    """

    begin_s: float
    end_s: float = 0.0
    steps: list[StepRecord] = field(default_factory=list)
    step_count: int = 0
    step_s: float = 0.0
    prefill_tokens: int = 0
    sampled_tokens: int = 0
    constraint_s: float = 0.0
    times: OperatorTimes | None = None

    @property
    def seconds(self) -> float:
        """How long it was."""
        return self.end_s - self.begin_s


class StepRecorder:
    """Records from `now` on. stop: ends the timing of operators; None where there is none."""

    def __init__(self, stop: StopTiming | None, *, now: float) -> None:
        self._stop = stop
        self._recording = Recording(now)

    def __repr__(self) -> str:
        return f"<StepRecorder {self._recording.step_count} steps>"

    def step(
        self, plan: StepPlan, begin_s: float, end_s: float, *, sampled_tokens: int, constraint_s: float | None
    ) -> None:
        """A step has ended."""
        made, seconds = self._recording, end_s - begin_s
        prefill_tokens = sum(len(chunk.token_ids) for chunk in plan.prefill)
        made.step_count += 1
        made.step_s += seconds
        made.prefill_tokens += prefill_tokens
        made.sampled_tokens += sampled_tokens
        made.constraint_s += constraint_s or 0.0
        if len(made.steps) < MOST_STEPS:
            made.steps.append(StepRecord(plan.step_seq, begin_s, seconds, prefill_tokens, sampled_tokens))

    def end(self, now: float) -> Recording:
        """All that was recorded; once."""
        made = self._recording
        made.end_s = now
        made.times = self._stop() if self._stop is not None else None
        return made
