from __future__ import annotations

import pytest

from scheduler_svc.core.request_state import TRANSITIONS, IllegalMove, Move, State, follow


def test_a_request_that_is_stopped_by_a_token_passes_every_state_to_the_end() -> None:
    state = State.WAITING
    for move in (Move.ADMIT, Move.PREFILL, Move.END, Move.SETTLE):
        state = follow(state, move)
    assert state is State.FINISHED


def test_a_retracted_request_waits_again_and_can_be_admitted_again() -> None:
    state = State.WAITING
    for move in (Move.ADMIT, Move.PREFILL, Move.RELEASE, Move.REQUEUE, Move.ADMIT):
        state = follow(state, move)
    assert state is State.PREFILLING


@pytest.mark.parametrize("state", State)
@pytest.mark.parametrize("move", Move)
def test_a_move_that_is_not_in_the_table_raises_and_names_state_and_move(state: State, move: Move) -> None:
    if move in TRANSITIONS[state]:
        assert follow(state, move) is TRANSITIONS[state][move]
        return
    with pytest.raises(IllegalMove, match=f"{state.value} cannot {move.value}"):
        follow(state, move)


def test_every_unfinished_request_can_be_ended_and_a_finished_one_cannot_move() -> None:
    unfinished = (State.WAITING, State.PREFILLING, State.DECODING, State.LEAVING)
    assert all(Move.END in TRANSITIONS[state] for state in unfinished)
    assert not TRANSITIONS[State.FINISHED]


def test_every_state_is_in_the_table_and_can_be_reached() -> None:
    reached = {State.WAITING} | {after for moves in TRANSITIONS.values() for after in moves.values()}
    assert reached == set(State) == set(TRANSITIONS)
