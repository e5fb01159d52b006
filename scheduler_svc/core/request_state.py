"""The states of a request on one replica, and the one table of what may follow what.

    WAITING ──ADMIT──► PREFILLING ──PREFILL──► DECODING
       ▲                   │                      │
       │                   └───────RELEASE────────┤
       └─────REQUEUE───── LEAVING ◄───────────────┘
                             │
    any unfinished ──END──► ENDING ──SETTLE──► FINISHED

A step in flight may still write into the pages of a request that has left its slot, so leaving takes two
moves: out of the plans at once, out of the pages when the last such step was applied.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from scheduler_svc.core.errors import SchedulerError


class State(enum.Enum):
    """Where a request is."""

    __hash__ = object.__hash__  # Enum's own is no built-in: it costs more than the look-up in the table.

    WAITING = "waiting"
    """In the queue: no slot, no pages."""
    PREFILLING = "prefilling"
    """In a slot; some of its known tokens have not been planned yet."""
    DECODING = "decoding"
    """In a slot; every decode step makes one token of it."""
    LEAVING = "leaving"
    """Out of its slot, retracted or with all its tokens planned; tokens of steps in flight still count."""
    ENDING = "ending"
    """Its last event is out; tokens of steps in flight are dropped."""
    FINISHED = "finished"
    """Nothing of it is left here."""


class Move(enum.Enum):
    """What happens to a request."""

    __hash__ = object.__hash__  # Enum's own is no built-in: it costs more than the look-up in the table.

    ADMIT = "admit"
    """It enters a slot."""
    PREFILL = "prefill"
    """The last of its known tokens is planned."""
    RELEASE = "release"
    """It leaves its slot before its last event."""
    REQUEUE = "requeue"
    """No step in flight touches it any more, and it has tokens to make: back to the queue."""
    END = "end"
    """Its last event: finished, cancelled, failed, or taken away with its replica."""
    SETTLE = "settle"
    """No step in flight touches it any more."""


TRANSITIONS: Mapping[State, Mapping[Move, State]] = {
    State.WAITING: {Move.ADMIT: State.PREFILLING, Move.END: State.FINISHED},
    State.PREFILLING: {
        Move.PREFILL: State.DECODING,
        Move.RELEASE: State.LEAVING,
        Move.END: State.ENDING,
    },
    State.DECODING: {Move.RELEASE: State.LEAVING, Move.END: State.ENDING},
    State.LEAVING: {Move.REQUEUE: State.WAITING, Move.END: State.ENDING},
    State.ENDING: {Move.SETTLE: State.FINISHED},
    State.FINISHED: {},
}


class IllegalMove(SchedulerError):
    """A move that the table does not know: a fault of the batcher's, never of a caller's."""

    def __init__(self, state: State, move: Move) -> None:
        self.state = state
        self.move = move
        super().__init__(f"a request that is {state.value} cannot {move.value}")


def follow(state: State, move: Move) -> State:
    """The state after `move`.

    Raises:
        IllegalMove: the table has no such move.
    """
    following = TRANSITIONS[state].get(move)
    if following is None:
        raise IllegalMove(state, move)
    return following
