"""Schedule policies: which waiting request goes first. Priorities come before any of them."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable

from scheduler_svc.core.errors import UnknownPolicy
from scheduler_svc.core.structures import Request

MatchedTokens = Callable[[], int]
"""Gives the tokens of a request that the cache holds; costs a look-up, so it is asked only where needed."""


class SchedulePolicy(ABC):
    """Ranks waiting requests: lower goes first, equal ranks in order of arrival.

    depends_on_cache: ranks change with the cache, so they are asked anew for every admission; otherwise once,
    when a request begins to wait.
    """

    depends_on_cache = False

    @abstractmethod
    def rank(self, request: Request, matched_tokens: MatchedTokens) -> float:
        """The rank of one request."""


class FirstComeFirstServed(SchedulePolicy):
    """`fcfs`: order of arrival."""

    def rank(self, request: Request, matched_tokens: MatchedTokens) -> float:
        """The same for all."""
        return 0.0


class LongestPrefixMatch(SchedulePolicy):
    """`lpm`: the longest cached prefix first, so that it is used before it is evicted."""

    depends_on_cache = True

    def rank(self, request: Request, matched_tokens: MatchedTokens) -> float:
        """More cached tokens go first."""
        return -float(matched_tokens())


class ShortestPrefillFirst(SchedulePolicy):
    """`shortest-prefill-first`: the fewest tokens to compute first."""

    depends_on_cache = True

    def rank(self, request: Request, matched_tokens: MatchedTokens) -> float:
        """Fewer tokens that are not cached go first."""
        return float(request.length - matched_tokens())


class LongestOutputFirst(SchedulePolicy):
    """`lof`: the most tokens still to make first, so that the long ones do not run alone at the end."""

    def rank(self, request: Request, matched_tokens: MatchedTokens) -> float:
        """More output tokens to make go first."""
        return -float(request.max_output_tokens - len(request.output))


class RandomOrder(SchedulePolicy):
    """`random`: any order, but the same one for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)

    def rank(self, request: Request, matched_tokens: MatchedTokens) -> float:
        """Uniform in [0, 1)."""
        return self._draw.random()


POLICIES: dict[str, Callable[[], SchedulePolicy]] = {
    "fcfs": FirstComeFirstServed,
    "lpm": LongestPrefixMatch,
    "shortest-prefill-first": ShortestPrefillFirst,
    "lof": LongestOutputFirst,
    "random": RandomOrder,
}


def make_policy(name: str) -> SchedulePolicy:
    """A new policy by the name that the field knows it by.

    Raises:
        UnknownPolicy: lists those known.
    """
    factory = POLICIES.get(name)
    if factory is None:
        raise UnknownPolicy(name, POLICIES)
    return factory()
