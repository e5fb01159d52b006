"""How long a step should take, learnt from the steps before it; its deadline follows from that."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_WEIGHT_OF_NEWEST = 0.2

MOST_STEPS_AHEAD = 16
"""Of one message, however short they are: a request that ends meanwhile computes as many in vain."""


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step. device_s and idle_s are what the executor says, 0.0 where it says nothing."""

    wall_s: float
    """From sending it, or from the end of the step before, to its result."""
    device_s: float
    idle_s: float
    """How long the device had waited for it."""
    constraint_s: float | None = None
    """Of device_s, for what slots may take; None where none has a constraint."""


@dataclass(frozen=True, slots=True)
class StepDeadline:
    """A step may take max(floor_s, factor × predicted) seconds."""

    floor_s: float
    factor: float


class StepTimePredictor:
    """Two moving averages: seconds of a step without prompt tokens, and seconds per prompt token."""

    def __init__(self) -> None:
        self._base_s = 0.0
        self._per_token_s = 0.0

    def observe(self, seconds: float, *, prefill_tokens: int) -> None:
        """A step with `prefill_tokens` prompt tokens took `seconds`."""
        if prefill_tokens:
            per_token_s = max(0.0, seconds - self._base_s) / prefill_tokens
            self._per_token_s = _average(self._per_token_s, per_token_s)
        else:
            self._base_s = _average(self._base_s, seconds)

    def predict(self, *, prefill_tokens: int = 0, steps: int = 1) -> float:
        """Seconds that `steps` steps with `prefill_tokens` prompt tokens in all should take; 0.0 where
        nothing is known.
        """
        return steps * self._base_s + prefill_tokens * self._per_token_s

    def deadline(self, limits: StepDeadline, *, prefill_tokens: int, steps: int = 1) -> float:
        """Seconds that so many steps may take."""
        return max(limits.floor_s, limits.factor * self.predict(prefill_tokens=prefill_tokens, steps=steps))

    def steps_within(self, window_s: float) -> int:
        """How many decode steps `window_s` holds; at least 1, and 1 where nothing is known."""
        return max(1, min(MOST_STEPS_AHEAD, int(window_s / self._base_s))) if self._base_s else 1


def share_time(seconds: float, device_s: Sequence[float]) -> list[float]:
    """Of steps that came together after `seconds`: how long each took, by what the device says of each, or
    in equal parts where it says nothing.
    """
    known = sum(device_s)
    if not known:
        return [seconds / len(device_s)] * len(device_s)
    return [seconds * each / known for each in device_s]


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else old + _WEIGHT_OF_NEWEST * (new - old)
