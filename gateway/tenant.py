"""Whose requests these are: a key's name, its part of the prefix cache, its budgets and what it used."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from gateway.budget import TokenBucket
from gateway.config import ApiKeyConfig
from gateway.validation import RESERVED_SALT_PREFIX
from meshkit.drain_rate import DrainRate
from meshkit.errors import InvalidArgument, ResourceExhausted


@dataclass
class Tally:
    """What a tenant used since the start, for metrics: plain numbers, added to on the event loop.

    refused: requests by the name of the budget that had no room.
    """

    requests: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0
    refused: Counter[str] = field(default_factory=Counter)
    refusals: Counter[str] = field(default_factory=Counter)
    """Requests by the reason for which they were not taken, by whomever."""


class Tenant:
    """One key's requests. Its budgets are this gateway's: each gateway counts for itself.

    name: of the key; "" for the requests that come without one.
    clock: monotonic seconds.
    """

    def __init__(
        self, config: ApiKeyConfig | None = None, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.name = "" if config is None else config.name
        self.tally = Tally()
        self._clock = clock
        self._share_cache = True
        self._is_operator = False
        self._max_live: int | None = None
        self._max_priority: int | None = None
        self._live_drain = DrainRate(now=clock())
        self._requests: TokenBucket | None = None
        self._tokens: TokenBucket | None = None
        if config is not None:
            self.configure(config)

    def __repr__(self) -> str:
        return f"<Tenant {self.name or 'anonymous'}>"

    @property
    def is_anonymous(self) -> bool:
        """Whether its requests come without a key."""
        return not self.name

    @property
    def is_operator(self) -> bool:
        """Whether its key says that it may see and steer the mesh."""
        return self._is_operator

    def configure(self, config: ApiKeyConfig) -> None:
        """Settings as `config` says from now on; what was spent of a budget stays spent."""
        now = self._clock()
        self._share_cache = config.share_cache
        self._is_operator = config.operator
        self._max_live = config.max_live_requests
        self._max_priority = config.max_priority
        self._requests = _limited(self._requests, config.requests_per_minute, now)
        self._tokens = _limited(self._tokens, config.tokens_per_minute, now)

    def salt(self, own: str) -> str:
        """The cache salt of a request whose client gave `own` ("" for none).

        Two tenants never have one salt, unless both share the cache: then it is the client's own. The name's
        length stands before it, so that where the name ends is not for the client to say.
        """
        if self._share_cache:
            return own
        return f"{RESERVED_SALT_PREFIX}{len(self.name)}:{self.name}:{own}"

    def check_priority(self, priority: int) -> None:
        """Raise InvalidArgument where a request asks for more than the key may."""
        if self._max_priority is not None and priority > self._max_priority:
            raise InvalidArgument(
                f"scheduling.priority is {priority}; this key may ask for at most {self._max_priority}",
                field="scheduling.priority",
            )

    def take_request(self) -> None:
        """Count one call that makes work.

        Raises:
            ResourceExhausted: requests_per_minute has no room; says when it has.
        """
        if self._requests is not None:
            now = self._clock()
            self._check("requests_per_minute", self._requests, now)
            self._requests.spend(1, now)

    def admit(self, *, live: int) -> None:
        """Count one generation that begins. live: the tenant's others that live.

        Raises:
            ResourceExhausted: a budget has no room; names it, its limit, and when it has.
        """
        if not live:
            self._live_drain.begin(self._clock())
        if self._max_live is not None and live >= self._max_live:
            wait_s = self._live_drain.refuse(1, self._clock())
            raise self._refusal(
                "max_live_requests",
                self._max_live,
                f"and {live} are live; there is room when one of them ends, at their pace in {wait_s:.3g} s",
                retry_after_s=wait_s,
            )
        self.check_tokens()
        self.take_request()

    def check_tokens(self) -> None:
        """Raise ResourceExhausted while tokens_per_minute has no room."""
        if self._tokens is not None:
            self._check("tokens_per_minute", self._tokens, self._clock())

    def spend(self, tokens: int) -> None:
        """Take tokens out of the budget, whether or not there is room; a negative number gives them back."""
        if self._tokens is not None:
            self._tokens.spend(tokens, self._clock())

    def count_ended(self) -> None:
        """One of its live requests has ended."""
        self._live_drain.left(1, self._clock())

    def count_accepted(self, prompt_tokens: int) -> None:
        """The mesh has taken a request, whose prompt was spent as it was admitted."""
        self.tally.requests += 1
        self.tally.prompt_tokens += prompt_tokens

    def count_output(self, tokens: int) -> None:
        """So many new tokens came. A stream that has begun is not cut: the budget goes below zero instead."""
        self.tally.generation_tokens += tokens
        self.spend(tokens)

    def _check(self, budget: str, bucket: TokenBucket, now: float) -> None:
        wait_s = bucket.wait_s(now)
        if wait_s > 0:
            raise self._refusal(
                budget,
                bucket.per_minute,
                f"and is used up; there is room in {wait_s:.3g} s",
                retry_after_s=wait_s,
            )

    def _refusal(self, budget: str, limit: int, fact: str, *, retry_after_s: float) -> ResourceExhausted:
        self.tally.refused[budget] += 1
        return ResourceExhausted(
            f"{budget} of this key is {limit}, {fact}",
            reason="BUDGET_EXHAUSTED",
            retry_after_s=retry_after_s,
            budget=budget,
            limit=limit,
        )


def _limited(bucket: TokenBucket | None, per_minute: int | None, now: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return TokenBucket(per_minute, now=now)
    bucket.change_limit(per_minute, now)
    return bucket
