"""Where a request goes: the group by weight, inside it the longest cached prefix, then the least load."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

ALLOWED_IMBALANCE = 4
"""A cached prefix draws a request to a replica with at most so many requests more than the idlest one."""


class WeightedTurns:
    """Smooth weighted round robin: of 10 turns at 80/20, the third and the eighth go to the lighter group.

    Each turn adds every name's weight to its credit; the highest credit is chosen and pays the sum. Names may
    differ from turn to turn; those absent neither gain nor pay.
    """

    def __init__(self) -> None:
        self._credit: dict[str, float] = {}

    def choose(self, weights: Mapping[str, float]) -> str | None:
        """The name whose turn it is, or None where no weight is above 0. Weights are at least 0."""
        total = sum(weights.values())
        if total <= 0:
            return None
        for name, weight in weights.items():
            self._credit[name] = self._credit.get(name, 0.0) + weight
        chosen = max((name for name in weights if weights[name] > 0), key=self._credit.__getitem__)
        self._credit[chosen] -= total
        return chosen

    def reset(self) -> None:
        """Start anew, as after a change of weights."""
        self._credit.clear()


@dataclass(frozen=True, slots=True)
class Candidate:
    """A replica that could take a request. `load`: its requests, running and waiting."""

    matched_tokens: int
    load: int


def choose_replica(candidates: Sequence[Candidate]) -> int:
    """The index of the best candidate; there is at least one. Equal ones: the first.

    Prefixes draw requests together, and load drives them apart: once a group's second replica has computed a
    shared prefix too, load decides between them.
    """
    bound = min(candidate.load for candidate in candidates) + ALLOWED_IMBALANCE
    return min(
        (index for index, candidate in enumerate(candidates) if candidate.load <= bound),
        key=lambda index: (-candidates[index].matched_tokens, candidates[index].load),
    )
