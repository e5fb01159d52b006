"""What one client saw of its stream, and what is wrong with it beside the oracle. No I/O, no clock."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Received:
    """One message of tokens. at: monotonic seconds of the client's receipt."""

    at: float
    first_index: int
    token_ids: tuple[int, ...]


@dataclass(slots=True)
class History:
    """One stream over all connections that it took. expected: the oracle's tokens, all that were asked for.

    attempts: for each connection the kinds of its events in order: accepted, output, finished.
    error: how the stream failed, where it did.
    """

    prompt: Sequence[int]
    expected: Sequence[int]
    attempts: list[list[str]] = field(default_factory=list)
    received: list[Received] = field(default_factory=list)
    completion_tokens: int | None = None
    """As the last event counts them; None before it."""
    ended_at: float | None = None
    error: str | None = None

    def tokens(self) -> list[int]:
        """All tokens in the order of their receipt."""
        return [token for message in self.received for token in message.token_ids]


@dataclass(frozen=True)
class Faults:
    """What clients lost by a run; all zero is what must be.

    lost, repeated, wrong: tokens that never came, came again, or differ from the oracle's (one past the end
    is wrong, too). failed: streams that ended with an error or not at all. disordered: connections whose
    events are not accepted, outputs, finished. miscounted: streams whose usage is not what was generated.
    """

    lost: int = 0
    repeated: int = 0
    wrong: int = 0
    failed: int = 0
    disordered: int = 0
    miscounted: int = 0

    def __add__(self, other: Faults) -> Faults:
        mine, theirs = dataclasses.astuple(self), dataclasses.astuple(other)
        return Faults(*(a + b for a, b in zip(mine, theirs, strict=True)))

    @property
    def any(self) -> bool:
        """Whether anything is not zero."""
        return any(dataclasses.astuple(self))


def check(history: History) -> Faults:
    """Compare one stream with the oracle. Of a failed one the tokens that never came are not lost as well."""
    lost = repeated = wrong = 0
    have = 0
    for message in history.received:
        lost += max(0, message.first_index - have)
        repeated += max(0, min(have - message.first_index, len(message.token_ids)))
        for index, token in enumerate(message.token_ids, start=message.first_index):
            wrong += index >= len(history.expected) or token != history.expected[index]
        have = max(have, message.first_index + len(message.token_ids))
    finished = history.completion_tokens is not None
    if finished:
        lost += max(0, len(history.expected) - have)
    return Faults(
        lost=lost,
        repeated=repeated,
        wrong=wrong,
        failed=history.error is not None or not finished,
        disordered=sum(not _in_order(kinds) for kinds in history.attempts) + (not history.attempts),
        miscounted=finished and history.completion_tokens != len(history.expected),
    )


def check_all(histories: Iterable[History]) -> Faults:
    """The sum over all streams."""
    return sum((check(history) for history in histories), Faults())


def _in_order(kinds: Sequence[str]) -> bool:
    """accepted once and first; finished once and last, or cut off before. Nothing at all is no disorder."""
    if not kinds:
        return True
    body = kinds[1:-1] if kinds[-1] == "finished" else kinds[1:]
    return kinds[0] == "accepted" and all(kind == "output" for kind in body)


def longest_silence_s(history: History, *, since: float) -> float | None:
    """Longest time between two receipts of which the later one is after `since`; None where nothing came."""
    times = [message.at for message in history.received]
    if history.ended_at is not None:
        times.append(history.ended_at)
    gaps = [later - earlier for earlier, later in itertools.pairwise(times) if later > since]
    return max(gaps, default=None)
