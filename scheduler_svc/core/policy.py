"""Schedule policies: which waiting request goes first. Priorities come before any of them."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable

from scheduler_svc.core.errors import UnknownPolicy
from scheduler_svc.core.structures import Request
from scheduler_svc.core.subtree_order import SubtreeWeightOrder
from scheduler_svc.core.waiting_order import RankedOrder, ResponseRatioOrder, WaitingOrder


class SchedulePolicy(ABC):
    """Puts waiting requests in order.

    depends_on_cache: what is cached of a request counts, so it is placed anew when that changes.
    """

    depends_on_cache = False

    @abstractmethod
    def make_order(self) -> WaitingOrder:
        """An empty order, for the queue of one replica."""


class RankPolicy(SchedulePolicy):
    """A policy that gives each request a number: lower goes first, equal ones in order of arrival."""

    @abstractmethod
    def rank(self, request: Request, cached_tokens: int) -> float:
        """The rank of one request. `cached_tokens` is 0 for policies that do not depend on the cache."""

    def make_order(self) -> WaitingOrder:
        """Sorted by rank."""
        return RankedOrder(self.rank)


class FirstComeFirstServed(RankPolicy):
    """`fcfs`: order of arrival."""

    def rank(self, request: Request, cached_tokens: int) -> float:
        """The same for all."""
        return 0.0


class LongestPrefixMatch(RankPolicy):
    """`lpm`: the longest cached prefix first, so that it is used before it is evicted."""

    depends_on_cache = True

    def rank(self, request: Request, cached_tokens: int) -> float:
        """More cached tokens go first."""
        return -float(cached_tokens)


class ShortestPrefillFirst(RankPolicy):
    """`shortest-prefill-first`: the fewest tokens to compute first."""

    depends_on_cache = True

    def rank(self, request: Request, cached_tokens: int) -> float:
        """Fewer tokens that are not cached go first."""
        return float(request.length - cached_tokens)


class LongestOutputFirst(RankPolicy):
    """`lof`: the most tokens still to make first, so that the long ones do not run alone at the end."""

    def rank(self, request: Request, cached_tokens: int) -> float:
        """More output tokens to make go first."""
        return -float(request.max_output_tokens - len(request.output))


class RandomOrder(RankPolicy):
    """`random`: any order, but the same one for the same seed."""

    def __init__(self, seed: int = 0) -> None:
        self._draw = random.Random(seed)

    def rank(self, request: Request, cached_tokens: int) -> float:
        """Uniform in [0, 1)."""
        return self._draw.random()


class HighestResponseRatioNext(SchedulePolicy):
    """`hrrn`: (waited + service) / service; service is the tokens to compute: short ones first, with age."""

    depends_on_cache = True

    def make_order(self) -> WaitingOrder:
        """Ordered anew for every admission, as ratios grow at different speeds."""
        return ResponseRatioOrder()


class SubtreeWeightFirst(SchedulePolicy):
    """`dfs-weight`: depth first through the tree, where the most requests wait below, so that they meet."""

    depends_on_cache = True

    def make_order(self) -> WaitingOrder:
        """Ordered by the weights of the subtrees."""
        return SubtreeWeightOrder()


POLICIES: dict[str, Callable[[], SchedulePolicy]] = {
    "fcfs": FirstComeFirstServed,
    "lpm": LongestPrefixMatch,
    "dfs-weight": SubtreeWeightFirst,
    "hrrn": HighestResponseRatioNext,
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
