"""All pages of one replica: the ledger's free ones, the tree's cached ones, and those that seats hold."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import Iterable

from scheduler_svc.core.errors import IdentityViolated
from scheduler_svc.core.eviction import make_eviction_policy
from scheduler_svc.core.kv_events import KvEventLog
from scheduler_svc.core.page_ledger import PageLedger
from scheduler_svc.core.radix_node import Node
from scheduler_svc.core.radix_tree import PrefixMatch, RadixTree
from scheduler_svc.core.seat import Seat, Ticket
from scheduler_svc.core.structures import PageCounts, ReplicaLimits
from scheduler_svc.core.token_key import TOKEN_BYTES, Namespace

_GROWTH_TOKENS = 64
"""A request that makes tokens gets pages for so many at once: it costs something only every so many steps."""
_PLENTY = 8
"""But only if so many times of that can be had."""


class PagePool:
    """Moves pages between ledger, tree and seats; each page is always in exactly one of them."""

    def __init__(self, limits: ReplicaLimits) -> None:
        self.page_size = limits.page_size
        self._page_bytes = limits.page_size * TOKEN_BYTES
        self._keeps_prefixes = limits.enable_radix_cache
        self._min_cached_tokens = limits.min_cached_tokens
        self.ledger = PageLedger(limits.page_count)
        eviction = make_eviction_policy(limits.eviction_policy)
        self.tree: RadixTree[Ticket] = RadixTree(page_size=limits.page_size, eviction=eviction)
        self.kv_events: KvEventLog | None = None
        """Changes of the tree, where they are recorded."""
        if limits.enable_kv_events:
            self.record_kv_events()
        self.evicted_count = 0
        """Cached pages given up for seats, since the start."""

    def __repr__(self) -> str:
        return f"<PagePool {self.ledger!r} {self.tree!r}>"

    @property
    def available(self) -> int:
        """Pages that `take` can give: free, or cached and not pinned."""
        return self.ledger.free_count + self.tree.evictable_count

    def record_kv_events(self) -> KvEventLog:
        """The log of the tree's changes; one that begins now tells first what is cached already."""
        if self.kv_events is None:
            self.kv_events = KvEventLog(page_size=self.page_size)
            self.tree.record_events(self.kv_events)
        return self.kv_events

    def pages_for(self, tokens: int) -> int:
        """Pages that hold so many tokens."""
        return -(-tokens // self.page_size)

    def plenty(self, *, requests: int = 1, spoken_for: int = 0) -> int:
        """Pages that each of so many requests may have ahead of its needs; 0 when pages are short."""
        most = -(-_GROWTH_TOKENS // self.page_size)
        return most if most * requests * _PLENTY <= self.available - spoken_for else 0

    # ------------------------------------------------------------ finding prefixes

    def match(self, ticket: Ticket) -> PrefixMatch:
        """The cached prefix of a waiting request. At least its last token is always computed."""
        match = ticket.match
        if match is None or not self.tree.still_holds(match, ticket.key):
            match = ticket.match = self.find(ticket.key, space=ticket.space)
        return match

    def find(self, key: bytes, *, space: Namespace) -> PrefixMatch:
        """The cached prefix that a request with these tokens could use; does not count as a use."""
        if not self._keeps_prefixes:
            return PrefixMatch(space, None, 0)
        limit = (len(key) // TOKEN_BYTES - 1) // self.page_size
        return self.tree.match(key, space=space, limit=limit)

    def pin(self, ticket: Ticket, match: PrefixMatch) -> tuple[Node | None, array[int]]:
        """Lock the cached prefix of a request that is to be admitted: the lock's node, and its pages."""
        node = self.tree.lock(match, priority=ticket.request.priority)
        return node, self.tree.pages_to(node) if node is not None else array("i")

    # ------------------------------------------------------------ moving pages

    def take(self, count: int) -> array[int] | None:
        """`count` pages for a seat, cached ones evicted where needed; None, and none evicted, if too few."""
        missing = count - self.ledger.free_count
        if missing > 0:
            if missing > self.tree.evictable_count:
                return None
            self.evicted_count += missing
            self.ledger.free(self.tree.evict(missing))
        return self.ledger.allocate(count)

    def confirm(self, seat: Seat, tokens: int) -> bool:
        """The first `tokens` of a seat's known tokens are in its pages: share the full ones with others.

        Returns False where another's copy of them was in the tree first: then what it computes stays its own.
        """
        full = self._cacheable(seat, tokens)
        if not full:
            return True
        node = self.tree.extend(
            seat.node,
            seat.key[seat.shared * self._page_bytes : full * self._page_bytes],
            seat.page_ids[seat.shared : full],
            space=seat.ticket.space,
            priority=seat.request.priority,
            take_lock=True,
        )
        if node is None:
            return False
        seat.node, seat.shared = node, full
        return True

    def give_back(self, seat: Seat) -> None:
        """Take all pages of a seat that no step touches any more: full confirmed ones are cached."""
        full = self._cacheable(seat, seat.written_tokens())
        self.ledger.free(self._cache(seat, full) if full else seat.owned_pages)
        if seat.node is not None:
            self.tree.unlock(seat.node)

    def _cache(self, seat: Seat, full: int) -> array[int]:
        """Give the tree the first `full` pages of a seat that leaves; those that it does not want."""
        ticket, priority = seat.ticket, seat.request.priority
        start, end = seat.shared * self._page_bytes, full * self._page_bytes
        tail, pages = ticket.key_after(start)[: end - start], seat.page_ids[seat.shared : full]
        if self.tree.extend(seat.node, tail, pages, space=ticket.space, priority=priority) is not None:
            return seat.page_ids[full:]
        key = ticket.key_after(0)[:end]
        known, _ = self.tree.insert(key, seat.page_ids[:full], space=ticket.space, priority=priority)
        return seat.page_ids[seat.shared : known] + seat.page_ids[full:]

    def returning(self, seat: Seat) -> int:
        """Pages that can be taken once the seat has given back its own."""
        pinned = self.tree.pinned_only_by(seat.node) if seat.node is not None else 0
        return len(seat.owned_pages) + pinned

    def _cacheable(self, seat: Seat, tokens: int) -> int:
        """Full pages of a seat that may go to the tree; 0 where there are none beside those it has."""
        full = tokens // self.page_size
        is_kept = self._keeps_prefixes and full * self.page_size >= self._min_cached_tokens
        return full if is_kept and full > seat.shared else 0

    def flush(self) -> int:
        """Free all cached pages that no seat pins; how many."""
        flushed = self.tree.clear()
        self.ledger.free(flushed)
        return len(flushed)

    # ------------------------------------------------------------ counting

    def counts(self, seats: Iterable[Seat]) -> PageCounts:
        """The pages by owner; `seats` are all that have not given theirs back."""
        return PageCounts(
            total=self.ledger.total,
            free=self.ledger.free_count,
            cached=self.tree.page_count,
            held=sum(len(seat.page_ids) - seat.shared for seat in seats),
        )

    def check(self, seats: Iterable[Seat]) -> None:
        """Every page has exactly one owner, counters and locks are right.

        Raises:
            IdentityViolated: says what does not add up.
        """
        seats = list(seats)
        self.tree.check(seat.node for seat in seats if seat.node is not None)
        counts = self.counts(seats)
        if counts.free + counts.cached + counts.held != counts.total:
            raise IdentityViolated(f"free + cached + held is not total: {counts}")
        owners = Counter(self.ledger.free_pages().tolist())
        for node in self.tree.nodes():
            owners.update(node.pages)
        for seat in seats:
            owners.update(seat.owned_pages)
        wrong = {page: owners[page] for page in range(counts.total) if owners[page] != 1}
        if wrong:
            raise IdentityViolated(f"pages without an owner (0), or with several: {wrong}")
