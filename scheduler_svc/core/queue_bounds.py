"""How many requests, and how many tokens of theirs, may wait; and whose share of that is used up.

Below a bound everybody gets in. At the bound only those whose requests take less than an even share of it,
until twice the bound is reached: so a queue that one owner has filled is not full for the others.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from scheduler_svc.core.errors import QueueFull

_SLACK = 2


class QueueTally:
    """What waits in one queue, in all and by owner."""

    __slots__ = ("requests", "requests_of", "tokens", "tokens_of")

    def __init__(self) -> None:
        self.requests = 0
        self.tokens = 0
        self.requests_of: Counter[str] = Counter()
        self.tokens_of: Counter[str] = Counter()

    def __repr__(self) -> str:
        return (
            f"<QueueTally {self.requests} requests, {self.tokens} tokens of {len(self.requests_of)} owners>"
        )

    def add(self, owner: str, tokens: int) -> None:
        """One more waits."""
        self.requests += 1
        self.tokens += tokens
        self.requests_of[owner] += 1
        self.tokens_of[owner] += tokens

    def remove(self, owner: str, tokens: int) -> None:
        """One less."""
        self.requests -= 1
        self.tokens -= tokens
        self.requests_of[owner] -= 1
        self.tokens_of[owner] -= tokens
        if not self.requests_of[owner]:
            del self.requests_of[owner], self.tokens_of[owner]


class QueueBounds:
    """Bounds over all queues of a mesh.

    max_tokens: prompt and output so far of all that wait; one request alone may have more.
    """

    def __init__(self, *, max_requests: int, max_tokens: int) -> None:
        self.max_requests = max_requests
        self.max_tokens = max_tokens

    def check(self, tallies: Iterable[QueueTally], *, owner: str, tokens: int) -> None:
        """Raises QueueFull where a request of `owner` with `tokens` tokens may not wait with all those."""
        known = list(tallies)
        requests = sum([each.requests for each in known])
        waiting_tokens = sum([each.tokens for each in known])
        if requests < self.max_requests and (not requests or waiting_tokens + tokens <= self.max_tokens):
            return  # As nearly always; whose they are is then of no interest.
        owners = {owner}.union(*(each.requests_of for each in known))
        own_requests = sum(each.requests_of[owner] for each in known)
        own_tokens = sum(each.tokens_of[owner] for each in known)
        if not _fits(requests, own_requests, 1, limit=self.max_requests, owners=len(owners)):
            raise QueueFull(self.max_requests, waiting=requests, what="requests")
        if not _fits(waiting_tokens, own_tokens, tokens, limit=self.max_tokens, owners=len(owners)):
            raise QueueFull(self.max_tokens, waiting=waiting_tokens, what="tokens")


def _fits(used: int, own: int, amount: int, *, limit: int, owners: int) -> bool:
    if not used or used + amount <= limit:
        return True
    return own + amount <= limit // owners and used + amount <= _SLACK * limit
