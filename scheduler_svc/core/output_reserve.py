"""How many pages to leave free at admission, so that what runs can grow: retraction should be rare.

A running request may make as many tokens as it has left, but most stop before. So a share of that is kept
free: 0.7 at first, falling over 600 decode steps without a retraction to a tenth, and back to 0.7 after one
(what SGLang's users know as schedule conservativeness).
"""

from __future__ import annotations

from collections import Counter

INITIAL_RATIO = 0.7
FLOOR_RATIO = 0.1
DECAY_STEPS = 600
CLIP_TOKENS = 4096
"""Longest future that is considered: limits are often set far higher than what is made."""


class OutputReserve:
    """Sums the tokens left of all running requests without visiting them: each has one less every step.

    A request enters with the tick (number of the decode step) at which nothing would be left of it.
    conservativeness: factor on the ratio; 0 keeps nothing free.
    """

    def __init__(self, *, conservativeness: float = 1.0) -> None:
        self._highest = INITIAL_RATIO * conservativeness
        self._lowest = FLOOR_RATIO * conservativeness
        self._due_count: Counter[int] = Counter()
        self._due_sum = 0
        self._active = 0
        self._tick = 0
        self._ratio = self._highest

    def __repr__(self) -> str:
        return f"<OutputReserve {self.tokens_left} tokens left, ratio {self._ratio:.2f}>"

    @property
    def tokens_left(self) -> int:
        """Tokens that all running requests may still make."""
        return self._due_sum - self._active * self._tick

    def wanted_tokens(self, extra: int) -> int:
        """Tokens to keep free when a request that may make `extra` tokens comes in."""
        return int(self._ratio * (self.tokens_left + min(extra, CLIP_TOKENS)))

    def enter(self, tokens: int) -> int:
        """A request that may make `tokens` tokens runs; returns its tick, for `leave`."""
        due = self._tick + min(tokens, CLIP_TOKENS)
        self._due_count[due] += 1
        self._due_sum += due
        self._active += 1
        return due

    def leave(self, due: int) -> None:
        """A request runs no more; without effect where its tick has passed."""
        if due > self._tick:
            self._due_count[due] -= 1
            self._forget(due, 1)

    def advance(self) -> None:
        """A decode step was planned."""
        self._tick += 1
        passed = self._due_count.pop(self._tick, 0)
        if passed:
            self._forget(self._tick, passed)
        self._ratio = max(self._lowest, self._ratio - (self._highest - self._lowest) / DECAY_STEPS)

    def retracted(self) -> None:
        """There was too little room: be careful again."""
        self._ratio = self._highest

    def _forget(self, due: int, count: int) -> None:
        self._due_sum -= due * count
        self._active -= count
