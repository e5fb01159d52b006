"""Who of the waiting requests enters a slot next, whether there is room, and who would have to give way."""

from __future__ import annotations

from collections.abc import Iterator

from scheduler_svc.core.decode_set import ROOM_TOKENS
from scheduler_svc.core.neighbours import Neighbours
from scheduler_svc.core.output_reserve import OutputReserve
from scheduler_svc.core.page_pool import PagePool
from scheduler_svc.core.radix_tree import PrefixMatch
from scheduler_svc.core.request_state import Move
from scheduler_svc.core.retraction import give_way
from scheduler_svc.core.seat import Seat, Ticket
from scheduler_svc.core.slots import SlotTable
from scheduler_svc.core.structures import ReplicaLimits
from scheduler_svc.core.waiting_queue import WaitingQueue


class AdmissionDesk:
    """Between the queue and the slots of one replica; owns neither."""

    def __init__(
        self,
        *,
        limits: ReplicaLimits,
        waiting: WaitingQueue,
        neighbours: Neighbours,
        pool: PagePool,
        slots: SlotTable,
        reserve: OutputReserve,
    ) -> None:
        self._limits = limits
        self._waiting = waiting
        self._neighbours = neighbours
        self._pool = pool
        self._slots = slots
        self._reserve = reserve

    def candidates(self, now: int) -> Iterator[tuple[Ticket, PrefixMatch]]:
        """The waiting requests in their order, each with its match; without those that wait for a neighbour.

        Each must have been admitted before the one after it is asked for. now: number of the step.
        """
        self._waiting.resume(self._neighbours.take_resumed())
        for ticket in self._waiting.in_order(now):
            match = self._pool.match(ticket)
            if not self._waiting.is_overdue(ticket) and self._neighbours.keeps_waiting(ticket, match):
                self._waiting.set_aside(ticket)
            else:
                yield ticket, match

    def admit(self, ticket: Ticket, match: PrefixMatch) -> Seat | None:
        """Give a request a slot and pages for all its known tokens; None, and nothing done, without room.

        A slot must be free.
        """
        known = self._pages_known(ticket)
        if self._missing_pages(ticket, match, known) > 0:
            return None
        node, page_ids = self._pool.pin(ticket, match)
        cached = len(page_ids)
        pages = self._pool.take(known - cached + self._pages_ahead(ticket, known, cached))
        assert pages is not None
        ticket.was_overdue = self._waiting.is_overdue(ticket)
        self._waiting.charge(
            ticket.request.owner, prompt_tokens=ticket.request.length - cached * self._limits.page_size
        )
        self._waiting.remove(ticket)
        ticket.move(Move.ADMIT)
        seat = ticket.seat = Seat.of(
            ticket,
            slot=self._slots.take(),
            page_ids=page_ids + pages,
            node=node,
            shared=cached,
            cached_tokens=cached * self._limits.page_size,
            reserve_due=self._reserve.enter(ticket.tokens_left),
        )
        self._slots.enter(seat)
        if self._limits.enable_radix_cache:
            self._neighbours.file(seat)
        return seat

    def victims(self, now: int) -> list[Seat]:
        """The running requests of lower priority that must be retracted so that the next one finds room.

        It takes their room when that comes free, perhaps some steps later. So what is on its way counts.
        """
        first = next(self.candidates(now), None)
        if first is None:
            return []
        ticket, match = first
        missing = self._missing_pages(ticket, match, self._pages_known(ticket)) - self.returning_pages()
        if self._slots.has_vacancy and missing <= 0:
            return []
        return give_way(
            ticket,
            self._slots.seats.values(),
            threshold=self._limits.preemption_threshold,
            missing=max(0, missing),
            pages_of=self._pages_gained,
        )

    def returning_pages(self) -> int:
        """Pages that come back when the steps in flight were applied."""
        return sum(self._pool.returning(seat) for seat in self._slots.leaving)

    # ------------------------------------------------------------ room

    def _missing_pages(self, ticket: Ticket, match: PrefixMatch, known: int) -> int:
        """Pages too few to admit a request, which wants `known` ones, now; 0 or less: it fits.

        What runs must be able to grow too; where nothing does, nothing is kept free for that.
        """
        wanted = known - match.depth
        if self._slots.seats:
            wanted += self._pool.pages_for(self._reserve.wanted_tokens(ticket.tokens_left))
        return wanted + self._pool.tree.unpinned_pages(match) - self._pool.available

    def _pages_known(self, ticket: Ticket) -> int:
        """Pages for the known tokens of a request, and for the room that decoding wants."""
        return self._pool.pages_for(min(ticket.request.length + ROOM_TOKENS, ticket.final_tokens))

    def _pages_ahead(self, ticket: Ticket, known: int, cached: int) -> int:
        """Pages beside the `known` ones, given at once where there are plenty: its output will fill them."""
        most = self._pool.plenty(spoken_for=known - cached)
        return min(most, self._pool.pages_for(ticket.final_tokens) - known)

    def _pages_gained(self, seat: Seat) -> int:
        """What the retraction of a seat brings, the room kept for its output included."""
        kept = self._reserve.wanted_tokens(seat.ticket.tokens_left) - self._reserve.wanted_tokens(0)
        return self._pool.returning(seat) + self._pool.pages_for(kept)
