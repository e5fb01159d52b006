"""A request on one replica: its ticket from `add` to its last event, and its seat while pages are its own.

Who owns which pages of a request, in order of position (a page is owned by exactly one of tree and seat):

    [0, cached)            the tree; found at admission, pinned by the seat's lock
    [cached, shared)       the tree, pinned likewise: given to it as results confirmed them
    [shared, page count)   the seat: being written, or ahead of the writing; or full, where another request's
                           copy of the same tokens came into the tree first. Then ours stay ours to the end
                           (the executor's page table names them), and the copy is not pinned

And the tokens, where `known` is prompt and output at admission:

    [0, cached × page)     computed by somebody else
    [.., confirmed)        in the pages, as a result told
    [confirmed, planned)   in steps in flight
    [planned, known)       to be planned; from `known` on the executor feeds itself
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from scheduler_svc.core.radix_node import Node
from scheduler_svc.core.radix_tree import PrefixMatch
from scheduler_svc.core.request_state import TRANSITIONS, Move, State, follow
from scheduler_svc.core.structures import Request, Slot
from scheduler_svc.core.token_key import TOKEN_BYTES, Namespace, token_key


@dataclass(slots=True, eq=False)
class Ticket:
    """A request from `add` to its last event."""

    request: Request
    key: bytes
    """Of prompt and output, as they were when it last came into the queue."""
    budget: int
    """Output tokens at which it ends at the latest: its own limit, or where the replica's room ends."""
    space: Namespace
    """The request's, made once."""
    final_tokens: int
    """Tokens that its pages hold at the very most: the last one made is never written."""
    state: State = State.WAITING
    was_retracted: bool = False
    turn: int = 0
    """While it waits: how many came into the queue before it."""
    waits_since: int = 0
    """While it waits: the step before which it came into the queue."""
    rank: float = 0.0
    """Its policy's, while it waits."""
    match: PrefixMatch | None = None
    """The last look-up of its prefix; `RadixTree.still_holds` says whether it is good."""
    cached_tokens: int = 0
    """Of that look-up, for policies that depend on the cache."""
    is_set_aside: bool = False
    """It waits for a neighbour to compute its prefix."""
    was_overdue: bool = False
    """It was admitted since it had waited for too long: it does not give way to others' priorities again."""
    seat: Seat | None = None

    def __repr__(self) -> str:
        return f"<Ticket of request {self.request.id}: {self.state.value}>"

    @classmethod
    def of(cls, request: Request, *, budget: int) -> Ticket:
        """The ticket of a request that may make `budget` output tokens in all."""
        return cls(
            request=request,
            key=token_key(request.prompt) + token_key(request.output),
            budget=budget,
            space=request.space,
            final_tokens=len(request.prompt) + budget - 1,
        )

    @property
    def tokens_left(self) -> int:
        """Output tokens that it may still make."""
        return self.budget - len(self.request.output)

    def move(self, move: Move) -> None:
        """Change the state as the table says."""
        self.state = TRANSITIONS[self.state].get(move) or follow(self.state, move)

    def key_after(self, start: int) -> bytes:
        """The key of prompt and output as they are now, without its first `start` bytes."""
        request, known = self.request, len(self.key)
        prompt_tokens = len(request.prompt)
        if start >= known:
            return token_key(request.output[start // TOKEN_BYTES - prompt_tokens :])
        return self.key[start:] + token_key(request.output[known // TOKEN_BYTES - prompt_tokens :])


@dataclass(slots=True, eq=False)
class Seat:
    """A request's stay in a slot. Counts are of tokens unless they say pages."""

    ticket: Ticket
    request: Request
    slot: Slot
    key: bytes
    """Of the `known` tokens."""
    known: int
    output: list[int]
    """The request's."""
    output_count: int
    """Output tokens at admission."""
    budget: int
    """The ticket's."""
    stop_token_ids: frozenset[int]
    """The request's."""
    page_ids: array[int]
    """32-bit ids in order of position."""
    node: Node | None
    """Where the lock sits; None: nothing is shared."""
    shared: int
    """Pages that the lock pins."""
    confirmed: int
    planned: int
    origin: int = 0
    """While it decodes: its length before the decode step of tick t is `origin + t` (decode_set.py)."""
    reserve_due: int = 0
    """Its tick in the OutputReserve."""
    computing: tuple[Node | Namespace, bytes] | None = None
    """Under which key others find that it computes a prefix of theirs."""
    last_step: int = 0
    """The last step that touches its pages."""
    is_dropped: bool = False
    """Tokens that still come are not wanted."""
    has_failed: bool = False
    """The executor gave it up: it samples no more, and what it wrote is not to be trusted."""
    release_planned: bool = False
    is_settled: bool = False
    """No step in flight touches it, and its pages went back."""

    def __repr__(self) -> str:
        return f"<Seat {self.slot} of request {self.request.id}: {self.ticket.state.value}>"

    @classmethod
    def of(
        cls,
        ticket: Ticket,
        *,
        slot: Slot,
        page_ids: array[int],
        node: Node | None,
        shared: int,
        cached_tokens: int,
        reserve_due: int,
    ) -> Seat:
        """A seat at admission: the first `shared` pages hold `cached_tokens` tokens, computed already."""
        request = ticket.request
        return cls(
            ticket=ticket,
            request=request,
            slot=slot,
            key=ticket.key,
            known=request.length,
            output=request.output,
            output_count=len(request.output),
            budget=ticket.budget,
            stop_token_ids=request.stop_token_ids,
            page_ids=page_ids,
            node=node,
            shared=shared,
            confirmed=cached_tokens,
            planned=cached_tokens,
            reserve_due=reserve_due,
        )

    @property
    def owned_pages(self) -> array[int]:
        """Pages that are the seat's, not the tree's."""
        return self.page_ids[self.shared :]

    def written_tokens(self) -> int:
        """Tokens from the start whose keys and values a result has confirmed."""
        if self.has_failed:
            return 0
        made = len(self.request.output) > self.output_count
        return max(self.confirmed, self.request.length - 1) if made else self.confirmed
