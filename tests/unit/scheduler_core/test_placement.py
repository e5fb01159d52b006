from __future__ import annotations

import pytest

from scheduler_svc.core.placement import ALLOWED_IMBALANCE, Candidate, WeightedTurns, choose_replica


def test_turns_follow_the_weights_and_are_spread_out() -> None:
    turns = WeightedTurns()
    chosen = [turns.choose({"big": 80, "small": 20}) for _ in range(10)]
    assert [index for index, name in enumerate(chosen, start=1) if name == "small"] == [3, 8]


def test_a_weight_of_zero_gets_nothing_and_only_zeros_give_nobody() -> None:
    turns = WeightedTurns()
    assert {turns.choose({"on": 1, "off": 0}) for _ in range(20)} == {"on"}
    assert turns.choose({"off": 0}) is None
    assert turns.choose({}) is None


def test_a_group_that_was_away_does_not_catch_up_afterwards() -> None:
    turns = WeightedTurns()
    for _ in range(50):
        turns.choose({"a": 1})
    chosen = [turns.choose({"a": 1, "b": 1}) for _ in range(20)]
    assert chosen.count("b") == 10


@pytest.mark.parametrize(
    ("candidates", "best"),
    [
        ([Candidate(0, 3), Candidate(0, 1)], 1),
        ([Candidate(64, 3), Candidate(0, 1)], 0),
        ([Candidate(64, 3), Candidate(64, 1)], 1),
        ([Candidate(64, 2 + ALLOWED_IMBALANCE), Candidate(0, 1)], 1),
        ([Candidate(0, 0), Candidate(0, 0)], 0),
    ],
    ids=[
        "less load",
        "longer prefix",
        "load among equal prefixes",
        "a prefix behind too long a queue",
        "first",
    ],
)
def test_a_replica_is_chosen_by(candidates: list[Candidate], best: int) -> None:
    assert choose_replica(candidates) == best
