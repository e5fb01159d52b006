"""The batcher of one replica: which requests run, what each step computes, which pages they use.

It plans from what will be, since a step may be in flight: a decoding seat will be one token longer after it.
What a step in flight touches stays as it is until its result was applied.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import replace
from itertools import compress

from scheduler_svc.core.admission import AdmissionDesk
from scheduler_svc.core.decode_set import DecodeSet
from scheduler_svc.core.errors import RequestTooLarge
from scheduler_svc.core.kv_events import KvEventLog, KvSnapshot
from scheduler_svc.core.neighbours import Neighbours
from scheduler_svc.core.output_reserve import OutputReserve
from scheduler_svc.core.page_pool import PagePool
from scheduler_svc.core.policy import SchedulePolicy
from scheduler_svc.core.queue_bounds import QueueTally
from scheduler_svc.core.radix_tree import PrefixMatch
from scheduler_svc.core.request_state import Move, State
from scheduler_svc.core.retraction import least_progressed
from scheduler_svc.core.seat import Seat, Ticket
from scheduler_svc.core.slots import SlotTable
from scheduler_svc.core.steps_in_flight import PlannedChunk, StepDraft, StepsInFlight
from scheduler_svc.core.structures import (
    Admission,
    Event,
    Failed,
    Finished,
    FinishReason,
    PageAppend,
    PageCounts,
    Placed,
    PrefillChunk,
    ReplicaId,
    ReplicaLimits,
    Request,
    RequestId,
    Slot,
    SlotFailure,
    StepPlan,
    StepResult,
    TokensMade,
)
from scheduler_svc.core.suspects import SuspectLine
from scheduler_svc.core.token_key import key_tokens, token_key
from scheduler_svc.core.waiting_queue import PATIENCE, WaitingQueue

_RETRY_TICKS = 8
"""A request that found no room is tried again when something changed, or after so many decode steps."""


class Batcher:
    """All requests of one replica, from `add` to their last event.

    limits: of the replica; policy: the order of admission, not shared with another batcher;
    conservativeness: how much is kept free for those that run when one more is admitted, 1 as usual;
    patience: by how many admissions policy and priorities may delay a request (waiting_queue.py).

    Raises:
        UnknownEvictionPolicy: the limits name one.
    """

    def __init__(
        self,
        *,
        limits: ReplicaLimits,
        policy: SchedulePolicy,
        replica: ReplicaId,
        conservativeness: float = 1.0,
        patience: int = PATIENCE,
    ) -> None:
        self.limits = limits
        self.replica = replica
        self.retracted_count = 0
        """Retractions so far, for want of pages or for a higher priority."""
        self.preempted_count = 0
        """Those for a higher priority."""
        self.load = 0
        """Unfinished requests, running and waiting. An attribute: placement reads it of every replica."""
        self.room_tokens = min(limits.context_tokens, limits.page_count * limits.page_size)
        """Longest sequence that fits, prompt and output together."""
        self._pool = PagePool(limits)
        self._waiting = WaitingQueue(policy, pool=self._pool, patience=patience)
        self._neighbours = Neighbours(page_size=limits.page_size)
        self._reserve = OutputReserve(conservativeness=conservativeness)
        self._tickets: dict[RequestId, Ticket] = {}
        self._prefilling: dict[Slot, Seat] = {}
        self._decoding = DecodeSet(page_size=limits.page_size, slot_count=limits.max_running_requests)
        self._slots = SlotTable(limits.max_running_requests)
        self._desk = AdmissionDesk(
            limits=limits,
            waiting=self._waiting,
            neighbours=self._neighbours,
            pool=self._pool,
            slots=self._slots,
            reserve=self._reserve,
        )
        self._suspects = SuspectLine()
        self._steps = StepsInFlight()
        self._next_seq = 1
        self._last_decode_seq = 0
        self._may_admit = True
        """Whether admission is worth a try: false after one that found no room, until something changes."""
        self._events: list[Event] = []

    def __repr__(self) -> str:
        return (
            f"<Batcher {self.replica} [running: {self.running}, waiting: {self.waiting}, "
            f"in flight: {self.steps_in_flight}] {self._pool!r}>"
        )

    # ------------------------------------------------------------ what it has

    @property
    def steps_in_flight(self) -> int:
        """Steps planned whose results have not been applied."""
        return len(self._steps)

    @property
    def running(self) -> int:
        """Requests that have or had a slot and are not finished."""
        return len(self._tickets) - self.waiting

    @property
    def waiting(self) -> int:
        """Requests in the queue, and those that will enter it."""
        return len(self._waiting) + len(self._suspects)

    @property
    def queue(self) -> QueueTally:
        """What waits in the queue, and of whom."""
        return self._waiting.tally

    @property
    def pages(self) -> PageCounts:
        """Pages by owner."""
        return self._pool.counts(self._slots.holders())

    @property
    def evictable_pages(self) -> int:
        """Cached pages that no request uses now."""
        return self._pool.tree.evictable_count

    @property
    def evicted_pages(self) -> int:
        """Cached pages given up for want of free ones, since the start."""
        return self._pool.evicted_count

    def fits(self, request: Request) -> bool:
        """Whether the replica could ever make a token of this request."""
        able = self.limits.takes_constraints or not request.is_constrained
        return able and request.length < self.room_tokens

    def matched_tokens(self, request: Request, *, key: bytes | None = None) -> int:
        """Tokens of a request that are cached here. `key`: its `token_key`, where the caller has it."""
        if key is None:
            key = token_key(request.prompt) + token_key(request.output)
        return self._pool.find(key, space=request.space).depth * self.limits.page_size

    @property
    def kv_events(self) -> KvEventLog | None:
        """The changes of the prefix cache, where they are recorded."""
        return self._pool.kv_events

    def record_kv_events(self) -> KvEventLog:
        """Record the changes of the prefix cache from now on, and tell what it holds. Idempotent."""
        return self._pool.record_kv_events()

    def kv_snapshot(self) -> KvSnapshot | None:
        """All that is cached, as of the last KV event; None where they are not recorded."""
        return self._pool.tree.kv_snapshot()

    # ------------------------------------------------------------ settings

    def set_ceilings(self, *, max_running_requests: int, chunk_tokens: int) -> None:
        """Other ceilings from the next plan on. Those that run beyond a lower one go on to their end."""
        self.limits = replace(
            self.limits, max_running_requests=max_running_requests, chunk_tokens=chunk_tokens
        )
        self._slots.set_ceiling(max_running_requests)
        self._decoding.make_room(max_running_requests)
        self._may_admit = True

    def set_policy(self, policy: SchedulePolicy) -> None:
        """Another order of admission, for those that wait too."""
        self._waiting.set_policy(policy)
        self._may_admit = True

    # ------------------------------------------------------------ requests

    def add(self, request: Request) -> None:
        """Take a request into the queue; one that brings output tokens goes on after them.

        It ends with LENGTH at its own limit, or where the replica's room ends (the longest sequence, or all
        of its pages), whichever comes first.

        Raises:
            RequestTooLarge: not even one token more would fit.
            ValueError: the prompt is empty, there is nothing left to make, or it is here already.
        """
        if not request.prompt or len(request.output) >= request.max_output_tokens:
            raise ValueError(
                f"request {request.id} has {len(request.prompt)} prompt tokens and "
                f"{len(request.output)} of at most {request.max_output_tokens} output tokens"
            )
        if request.id in self._tickets:
            raise ValueError(f"request {request.id} is here already")
        if not self.fits(request):
            raise RequestTooLarge(tokens=request.length, room_tokens=self.room_tokens)
        budget = min(request.max_output_tokens, self.room_tokens - len(request.prompt))
        ticket = Ticket.of(request, budget=budget)
        self._tickets[request.id] = ticket
        self.load += 1
        self._wait(ticket)

    def cancel(self, request: Request) -> list[Event]:
        """End a request, wherever it is. Idempotent: without effect once it has had its last event."""
        ticket = self._tickets.get(request.id)
        if ticket is None:
            return []
        self._end(ticket)
        self._let_suspects_through()
        self._settle(applied_seq=self._steps.applied_seq)
        return [Finished(request, FinishReason.CANCELLED)]

    def lose(self, *, blame: bool = True) -> list[Request]:
        """The replica is gone: its unfinished requests, running ones first, each group oldest first.

        blame: those that were in a slot are suspects of its death. Nothing is left here afterwards.
        """
        waiting = [ticket.request for ticket in [*self._waiting, *self._suspects.held()]]
        ran = [ticket.request for ticket in self._tickets.values() if ticket.state is not State.WAITING]
        if blame:
            for request in ran:
                request.blame(self.replica, steps_in_flight=self.steps_in_flight)
        for ticket in list(self._tickets.values()):
            self._end(ticket)
        self._steps.clear()
        self._settle(applied_seq=None)
        self._slots.take_releases()
        self.flush_cache()
        ran.sort(key=lambda request: request.id)
        waiting.sort(key=lambda request: request.id)
        return ran + waiting

    def flush_cache(self) -> int:
        """Drop all cached pages that no request uses; how many."""
        self._may_admit = True
        return self._pool.flush()

    def take_events(self) -> list[Event]:
        """Events of planning since the last call: Placed, when a request enters a slot."""
        events, self._events = self._events, []
        return events

    def check_identity(self) -> None:
        """Every page has one owner, every lock a seat, every slot one place.

        Raises:
            IdentityViolated: says what does not add up.
        """
        self._pool.check(self._slots.holders())
        self._slots.check()

    # ------------------------------------------------------------ planning

    def plan(self) -> StepPlan | None:
        """The next step, or None where there is nothing to do (perhaps until a step in flight is applied)."""
        draft = StepDraft(self._next_seq)
        for seat in self._decoding.take_spent():
            self._release(seat)
        if self.limits.priority_preemption and self._may_admit and self._waiting:
            self._preempt()
        if self.limits.enable_mixed_chunk:
            self._plan_decode(draft)
            self._plan_prefill(draft)
        else:
            self._plan_prefill(draft)
            if not draft.prefill:
                self._plan_decode(draft)
        draft.released += self._slots.take_releases()
        plan = draft.plan(ends_request=self._decoding.has_spent)
        if plan is not None:
            self._next_seq += 1
            self._steps.add(draft.in_flight())
        return plan

    # ---- decoding

    def _plan_decode(self, draft: StepDraft) -> None:
        draft.pages += self._grow()
        if self._decoding.can_decode:
            draft.roster = self._decoding.roster()
            self._decoding.advance()
            self._reserve.advance()
            self._last_decode_seq = draft.step_seq
            if self._decoding.tick % _RETRY_TICKS == 0:
                self._may_admit = True

    def _grow(self) -> list[PageAppend]:
        """Give each seat that needs one its next page; where there are too few, retract others."""
        needy = self._decoding.take_needy()
        if not needy:
            return []
        grown: dict[Seat, list[int]] = {}
        while needy:
            needy = self._give_pages(needy, grown)
            if not needy or self._desk.returning_pages() >= len(needy):
                break
            victim = least_progressed(self._slots.seats.values())
            if victim is None:
                break
            self._retract(victim)
            self._reserve.retracted()
            # What was given up for the running ones is not to be taken by the next in the queue.
            self._may_admit = False
            needy = [seat for seat in needy if seat is not victim]
        self._decoding.leave_starving(needy)
        return [
            PageAppend(seat.slot, pages)
            for seat, pages in grown.items()
            if seat.ticket.state is State.DECODING
        ]

    def _give_pages(self, needy: list[Seat], grown: dict[Seat, list[int]]) -> list[Seat]:
        """Pages to each as far as there are any; those that still want one."""
        most = self._pool.plenty(requests=len(needy))
        wanted = [self._decoding.pages_ahead(seat, most) for seat in needy]
        pages = self._pool.take(min(sum(wanted), self._pool.available)) or array("i")
        hungry, start = [], 0
        for served, (seat, count) in enumerate(zip(needy, wanted, strict=True)):
            given = pages[start : start + count]
            if not given:
                hungry += needy[served:]
                break
            start += count
            grown.setdefault(seat, []).extend(given)
            if self._decoding.give_pages(seat, given):
                hungry.append(seat)
        return self._give_pages(hungry, grown) if hungry and self._pool.available else hungry

    def _retract(self, seat: Seat) -> None:
        self.retracted_count += 1
        self._release(seat)
        self._settle(applied_seq=self._steps.applied_seq)

    def _preempt(self) -> None:
        """Retract running requests of lower priority if that is what the next in the queue needs."""
        for seat in self._desk.victims(self._next_seq):
            self.preempted_count += 1
            self._retract(seat)

    # ---- prefilling

    def _plan_prefill(self, draft: StepDraft) -> None:
        draft.released += self._slots.take_releases()  # Slots released by this plan can be given away by it.
        left = self.limits.chunk_tokens
        for seat in list(self._prefilling.values()):
            if not left:
                return
            left -= self._plan_chunk(seat, left, draft)
        if left and self._may_admit and self._waiting and self._slots.free_count:
            self._admit_waiting(left, draft)

    def _admit_waiting(self, left: int, draft: StepDraft) -> None:
        """Admit in the policy's order; one that finds no room keeps those behind it waiting too."""
        for ticket, match in self._desk.candidates(self._next_seq):
            if self._is_better_whole(ticket, match, left):
                return
            seat = self._desk.admit(ticket, match)
            if seat is None:
                break
            self._prefilling[seat.slot] = seat
            draft.admitted.append(self._admission(seat))
            left -= self._plan_chunk(seat, left, draft)
            if not left or not self._slots.free_count:
                return
        self._may_admit = False

    def _is_better_whole(self, ticket: Ticket, match: PrefixMatch, left: int) -> bool:
        """Whether a prompt too long for the rest of a step is left to the next one, where it fits whole.

        Begun here it would hardly end sooner, and those that end in this step would wait for its beginning.
        A step is half full at least all the same: steps cost something too.
        """
        most = self.limits.chunk_tokens
        wanted = ticket.request.length - match.depth * self.limits.page_size
        return left < wanted <= most and left <= most // 2

    def _admission(self, seat: Seat) -> Admission:
        self._events.append(Placed(seat.request, self.replica, seat.planned))
        return Admission(
            slot=seat.slot,
            request=seat.request,
            output_count=seat.output_count,
            cached_tokens=seat.planned,
            page_ids=seat.page_ids.tolist(),
        )

    def _plan_chunk(self, seat: Seat, most: int, draft: StepDraft) -> int:
        """The next run of a seat's known tokens; how many."""
        start, end = seat.planned, min(seat.known, seat.planned + most)
        tokens = key_tokens(seat.key, start, end)
        is_last = end == seat.known
        draft.prefill.append(PrefillChunk(seat.slot, start, tokens, is_last))
        draft.chunks.append(PlannedChunk(seat, end))
        seat.planned, seat.last_step = end, draft.step_seq
        if is_last:
            seat.ticket.move(Move.PREFILL)
            del self._prefilling[seat.slot]
            self._decoding.join(seat)
            draft.finished_prefills.append(seat)
        return end - start

    # ------------------------------------------------------------ results

    def apply(self, result: StepResult) -> list[Event]:
        """Take the result of the oldest step in flight.

        Raises:
            StepOutOfOrder: it is of another step. Nothing was applied.
            ResultContradictsPlan: its slots are not those planned. Nothing was applied.
        """
        step = self._steps.oldest(result)
        seats = step.seats_of(result)
        self._steps.drop_oldest()
        events: list[Event] = []
        for failure in result.failures:
            self._fail(step.seats, step.chunks, failure, events)
        for chunk in step.chunks:
            self._confirm_chunk(chunk)
        self._take_tokens(seats, result, events)
        self._let_suspects_through()
        self._settle(applied_seq=self._steps.applied_seq)
        return events

    def _take_tokens(self, seats: Sequence[Seat], result: StepResult, events: list[Event]) -> None:
        token_ids, logprobs = result.token_ids, result.logprobs
        ended: list[tuple[Seat, FinishReason]] = []
        some_are_dropped = False
        for seat, token in zip(seats, token_ids, strict=True):  # The hot loop: once per token made.
            if seat.is_dropped:
                some_are_dropped = True
                continue
            output = seat.output
            output.append(token)
            if token in seat.stop_token_ids:
                ended.append((seat, FinishReason.STOP))
            elif len(output) >= seat.budget:
                ended.append((seat, FinishReason.LENGTH))
        if some_are_dropped:
            wanted = [not seat.is_dropped for seat in seats]
            seats = list(compress(seats, wanted))
            token_ids, logprobs = list(compress(token_ids, wanted)), list(compress(logprobs, wanted))
        if seats:
            events.append(TokensMade([seat.request for seat in seats], token_ids, logprobs))
        for seat, reason in ended:
            self._end(seat.ticket)
            events.append(Finished(seat.request, reason))

    def _confirm_chunk(self, chunk: PlannedChunk) -> None:
        seat = chunk.seat
        if seat.has_failed:
            return
        seat.confirmed = chunk.end
        if self._slots.seats.get(seat.slot) is seat:
            is_first = self._pool.confirm(seat, chunk.end)
            if self.limits.enable_radix_cache and is_first and chunk.end < seat.known:
                self._neighbours.file(seat)
            else:
                self._neighbours.forget(seat)
        self._may_admit = True

    def _fail(
        self,
        samplers: Sequence[Seat],
        chunks: Sequence[PlannedChunk],
        failure: SlotFailure,
        events: list[Event],
    ) -> None:
        computed = [*samplers, *(chunk.seat for chunk in chunks)]
        seat = next(seat for seat in computed if seat.slot == failure.slot)
        seat.has_failed = True
        if not seat.is_dropped:
            self._end(seat.ticket)
            events.append(Failed(seat.request, failure.reason, failure.message))

    # ------------------------------------------------------------ leaving

    def _wait(self, ticket: Ticket) -> None:
        if self._suspects.lets_through(ticket):
            self._waiting.add(ticket, now=self._next_seq)
            self._may_admit = True

    def _let_suspects_through(self) -> None:
        """Those whose turn it is, now that others were cleared or have ended."""
        if not self._suspects.is_busy:
            return
        for ticket in self._suspects.next_group():
            self._waiting.add(ticket, now=self._next_seq)
            self._may_admit = True

    def _end(self, ticket: Ticket) -> None:
        """A request has its last event: out of the queue or its slot; tokens that still come are dropped."""
        del self._tickets[ticket.request.id]
        self.load -= 1
        is_held = self._suspects.discard(ticket)
        if ticket.state is State.WAITING:
            if not is_held:
                self._waiting.remove(ticket)
            self._may_admit = True  # It may have been the one that found no room.
        elif ticket.seat is not None:
            made = len(ticket.request.output) - ticket.seat.output_count
            self._waiting.charge(ticket.request.owner, output_tokens=made)
            ticket.seat.is_dropped = True
            if ticket.state is not State.LEAVING:
                self._leave_slot(ticket.seat)
        ticket.move(Move.END)

    def _release(self, seat: Seat) -> None:
        """A request leaves its slot before its end: retracted, or all its tokens are planned."""
        self._leave_slot(seat)
        seat.ticket.move(Move.RELEASE)

    def _leave_slot(self, seat: Seat) -> None:
        if seat.ticket.state is State.DECODING:
            seat.last_step = max(seat.last_step, self._last_decode_seq)
        self._slots.leave(seat)
        self._prefilling.pop(seat.slot, None)
        self._decoding.discard(seat)
        self._reserve.leave(seat.reserve_due)
        self._neighbours.forget(seat)

    def _settle(self, *, applied_seq: int | None) -> None:
        """Take back the pages of those that no step after `applied_seq` touches; None: no step will come."""
        if not self._slots.leaving:
            return
        for seat in self._slots.settle(applied_seq=applied_seq):
            self._settle_one(seat)
        self._may_admit = True

    def _settle_one(self, seat: Seat) -> None:
        self._pool.give_back(seat)
        ticket = seat.ticket
        ticket.seat = None  # Before its seat dies: no cycle is left for the collector.
        if ticket.state is State.LEAVING:
            ticket.was_retracted = True
            ticket.key = ticket.key_after(0)
            ticket.move(Move.REQUEUE)
            self._wait(ticket)
        else:
            ticket.move(Move.SETTLE)
