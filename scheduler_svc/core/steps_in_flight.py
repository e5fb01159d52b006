"""Steps that were planned and whose results are not back: what each result must bring, and to whom."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

from scheduler_svc.core.decode_set import Roster
from scheduler_svc.core.errors import ResultContradictsPlan, StepOutOfOrder
from scheduler_svc.core.seat import Seat
from scheduler_svc.core.structures import Admission, PageAppend, PrefillChunk, Slot, StepPlan, StepResult


@dataclass(slots=True)
class PlannedChunk:
    """A seat's known tokens up to `end` are computed in a step."""

    seat: Seat
    end: int


@dataclass(slots=True)
class StepDraft:
    """A step while it is planned."""

    step_seq: int
    released: list[Slot] = field(default_factory=list)
    admitted: list[Admission] = field(default_factory=list)
    pages: list[PageAppend] = field(default_factory=list)
    prefill: list[PrefillChunk] = field(default_factory=list)
    roster: Roster | None = None
    chunks: list[PlannedChunk] = field(default_factory=list)
    finished_prefills: list[Seat] = field(default_factory=list)

    def plan(self, *, ends_request: bool) -> StepPlan | None:
        """The plan, or None where there is nothing in it."""
        decode = self.roster is not None
        if not (decode or self.released or self.prefill or self.pages):
            return None
        return StepPlan(
            step_seq=self.step_seq,
            released_slots=tuple(self.released),
            admitted=tuple(self.admitted),
            pages=tuple(self.pages),
            prefill=tuple(self.prefill),
            decode=decode,
            ends_request=ends_request,
        )

    def in_flight(self) -> StepInFlight:
        """What to expect of the result."""
        roster = self.roster or _NOBODY
        if not self.finished_prefills:
            return StepInFlight(self.step_seq, roster.slots, roster.seats, self.chunks)
        slots = roster.slots + [seat.slot for seat in self.finished_prefills]
        return StepInFlight(self.step_seq, slots, roster.seats + self.finished_prefills, self.chunks)


_NOBODY = Roster([], [])


@dataclass(frozen=True, slots=True)
class StepInFlight:
    """Slots that sample, in the order of the result, their seats, and the prompt chunks."""

    step_seq: int
    slots: list[Slot]
    seats: list[Seat]
    chunks: list[PlannedChunk]

    def seats_of(self, result: StepResult) -> Sequence[Seat]:
        """The seats of the result's tokens, in its order.

        Raises:
            ResultContradictsPlan: a slot is missing, or is there without having been planned.
        """
        if len(result.token_ids) != len(result.slots):
            raise ResultContradictsPlan(
                f"step {result.step_seq} brings {len(result.slots)} slots and {len(result.token_ids)} tokens"
            )
        if result.slots == self.slots and not result.failures:
            return self.seats
        return self._seats_one_by_one(result)

    def _seats_one_by_one(self, result: StepResult) -> Sequence[Seat]:
        """A slot that fails here, or failed in the step before, brings no token."""
        planned = dict(zip(self.slots, self.seats, strict=True))
        computed = set(planned) | {chunk.seat.slot for chunk in self.chunks}
        failing = {failure.slot for failure in result.failures}
        sampled = set(result.slots)
        excused = failing | {slot for slot, seat in planned.items() if seat.has_failed}
        missing, unplanned = set(planned) - sampled - excused, sampled - set(planned) | failing - computed
        if missing or unplanned or len(sampled) != len(result.slots) or sampled & failing:
            raise ResultContradictsPlan(
                f"step {result.step_seq}: slots {sorted(missing)} brought no token; "
                f"slots {sorted(unplanned)} were not planned to; all that came: {list(result.slots)}, "
                f"failed: {sorted(failing)}"
            )
        return [planned[Slot(slot)] for slot in result.slots]


class StepsInFlight:
    """The steps whose results are awaited, oldest first."""

    def __init__(self) -> None:
        self._steps: deque[StepInFlight] = deque()
        self.applied_seq = 0
        """The last step whose result was applied."""

    def __len__(self) -> int:
        return len(self._steps)

    def add(self, step: StepInFlight) -> None:
        """One more was planned."""
        self._steps.append(step)

    def oldest(self, result: StepResult) -> StepInFlight:
        """The step that a result belongs to.

        Raises:
            StepOutOfOrder: it is not of the oldest step.
        """
        expected = self._steps[0].step_seq if self._steps else None
        if result.step_seq != expected:
            raise StepOutOfOrder(result.step_seq, expected)
        return self._steps[0]

    def drop_oldest(self) -> None:
        """The oldest was applied."""
        self.applied_seq = self._steps.popleft().step_seq

    def clear(self) -> None:
        """No result will come any more."""
        self._steps.clear()
