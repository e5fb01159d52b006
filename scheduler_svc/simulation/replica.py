"""A modelled chip: keeps which slots decode, and says what a step makes and how long it takes."""

from __future__ import annotations

from bisect import insort

from scheduler_svc.core.structures import StepPlan, StepResult
from scheduler_svc.simulation.fleet import ChipModel

TOKEN = 7
"""Every token that is made: what the answer says does not matter here, only how long it is."""


class SimulatedChip:
    """State of an executor, as far as time depends on it."""

    def __init__(self, model: ChipModel) -> None:
        self._model = model
        self._decoding: list[int] = []
        """Slots, ascending."""
        self._length: dict[int, int] = {}
        """Tokens of each slot."""
        self._context = 0
        """Tokens of all decoding slots."""

    def run(self, plan: StepPlan) -> tuple[StepResult, float]:
        """(result, seconds) of one step."""
        for released in plan.released_slots:
            self._release(released)
        for admission in plan.admitted:
            self._length[int(admission.slot)] = admission.cached_tokens
        decoded = list(self._decoding) if plan.decode else []
        seconds = self._model.step_s(
            prefill_tokens=sum(len(chunk.token_ids) for chunk in plan.prefill),
            decoding=len(decoded),
            context_tokens=self._context if decoded else 0,
        )
        for slot in decoded:
            self._length[slot] += 1
        self._context += len(decoded)
        slots = decoded + self._prefill(plan)
        return StepResult(plan.step_seq, slots, [TOKEN] * len(slots)), seconds

    def _prefill(self, plan: StepPlan) -> list[int]:
        """Slots whose last chunk this was: they decode from the next step on."""
        ready: list[int] = []
        for chunk in plan.prefill:
            self._length[chunk.slot] += len(chunk.token_ids)
            if chunk.last:
                ready.append(chunk.slot)
                insort(self._decoding, chunk.slot)
                self._context += self._length[chunk.slot]
        return ready

    def _release(self, slot: int) -> None:
        length = self._length.pop(slot, 0)
        if slot in self._decoding:
            self._decoding.remove(slot)
            self._context -= length
