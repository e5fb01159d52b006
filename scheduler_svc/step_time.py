"""How long a step should take, learnt from the steps before it; its deadline follows from that."""

from __future__ import annotations

from dataclasses import dataclass

_WEIGHT_OF_NEWEST = 0.2


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of one step. device_s and idle_s are what the executor says, 0.0 where it says nothing."""

    wall_s: float
    """From sending it, or from the end of the step before, to its result."""
    device_s: float
    idle_s: float
    """How long the device had waited for it."""


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

    def predict(self, *, prefill_tokens: int) -> float:
        """Seconds that a step with `prefill_tokens` prompt tokens should take; 0.0 where nothing is known."""
        return self._base_s + prefill_tokens * self._per_token_s

    def deadline(self, limits: StepDeadline, *, prefill_tokens: int) -> float:
        """Seconds that a step may take."""
        return max(limits.floor_s, limits.factor * self.predict(prefill_tokens=prefill_tokens))


def _average(old: float, new: float) -> float:
    return new if old == 0.0 else old + _WEIGHT_OF_NEWEST * (new - old)
