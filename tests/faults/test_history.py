"""The checker of client histories catches what it is there to catch: each kind of loss, planted."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from chaos.history import Faults, History, Received, check, longest_silence_s
from chaos.report import Outcome, Target, percentiles, summarise, within
from plugins.hash.oracle import continue_tokens

PROMPT = [3, 1, 4]
COUNT = 8
TOKENS = continue_tokens(PROMPT, COUNT, 32_000)


def history(*messages: tuple[int, Sequence[int]], finished: bool = True) -> History:
    """A stream that got these messages, (first index, tokens), one each second."""
    made = History(PROMPT, TOKENS)
    made.attempts = [["accepted", *["output"] * len(messages), *(["finished"] if finished else [])]]
    made.received = [Received(float(at), first, tuple(tokens)) for at, (first, tokens) in enumerate(messages)]
    made.completion_tokens = COUNT if finished else None
    made.ended_at = float(len(messages))
    return made


def test_a_whole_stream_in_order_is_clean() -> None:
    assert check(history((0, TOKENS[:3]), (3, TOKENS[3:]))) == Faults()


def test_a_token_that_never_came_is_lost() -> None:
    assert check(history((0, TOKENS[:3]), (4, TOKENS[4:]))) == Faults(lost=1)


def test_a_finished_stream_that_is_too_short_has_lost_its_rest() -> None:
    assert check(history((0, TOKENS[:5]))) == Faults(lost=3)


def test_tokens_that_come_again_are_repeated() -> None:
    assert check(history((0, TOKENS[:5]), (3, TOKENS[3:]))) == Faults(repeated=2)


def test_tokens_that_come_again_as_if_they_were_new_are_wrong() -> None:
    assert check(history((0, TOKENS[:4]), (4, TOKENS[3:7]))).wrong == 4


def test_a_token_that_differs_from_the_oracle_is_wrong() -> None:
    assert check(history((0, [*TOKENS[:4], (TOKENS[4] + 1) % 32_000, *TOKENS[5:]]))) == Faults(wrong=1)


def test_a_token_past_the_end_is_wrong() -> None:
    assert check(history((0, [*TOKENS, 1]))) == Faults(wrong=1)


def test_a_stream_without_an_end_has_failed_and_its_rest_is_not_lost_as_well() -> None:
    assert check(history((0, TOKENS[:5]), finished=False)) == Faults(failed=1)


def test_a_stream_that_ended_with_an_error_has_failed() -> None:
    made = history((0, TOKENS[:5]), finished=False)
    made.error = "INTERNAL: x"
    assert check(made) == Faults(failed=1)


@pytest.mark.parametrize(
    "kinds",
    [
        ["output", "finished"],
        ["accepted", "finished", "output"],
        ["accepted", "accepted", "output", "finished"],
        ["accepted", "output", "finished", "finished"],
    ],
)
def test_events_out_of_order_are_told(kinds: list[str]) -> None:
    made = history((0, TOKENS))
    made.attempts = [kinds]
    assert check(made) == Faults(disordered=1)


def test_a_stream_that_went_on_at_another_gateway_is_in_order() -> None:
    made = history((0, TOKENS[:3]), (3, TOKENS[3:]))
    made.attempts = [["accepted", "output"], [], ["accepted", "output", "finished"]]
    assert check(made) == Faults()


def test_usage_that_counts_a_replay_twice_is_told() -> None:
    made = history((0, TOKENS))
    made.completion_tokens = COUNT + 3
    assert check(made) == Faults(miscounted=1)


def test_the_silence_that_covers_the_fault_is_measured_and_earlier_ones_are_not() -> None:
    made = history((0, TOKENS))
    made.received = [Received(at, 0, ()) for at in (0.0, 7.0, 7.5, 9.5, 9.75)]
    made.ended_at = 10.0
    assert longest_silence_s(made, since=8.0) == 2.0
    assert longest_silence_s(made, since=6.0) == 7.0
    assert longest_silence_s(made, since=11.0) is None


def outcome(**changes: object) -> Outcome:
    made = Outcome(runs=1, streams=1, faults_injected=1, detection_ms=[10.0], gap_ms=[20.0])
    for name, value in changes.items():
        setattr(made, name, value)
    return made


def test_a_run_without_a_fault_is_not_clean() -> None:
    assert outcome().clean
    assert not outcome(faults_injected=0).clean


@pytest.mark.parametrize(
    "changes",
    [{"faults": Faults(lost=1)}, {"faults": Faults(miscounted=1)}, {"leaked_pages": 1}, {"problems": ["x"]}],
)
def test_anything_that_is_not_zero_is_not_clean(changes: dict[str, object]) -> None:
    assert not outcome(**changes).clean


def test_a_time_over_its_bound_or_never_measured_is_outside_of_the_target() -> None:
    assert within(outcome(), Target(10, 20))
    assert not within(outcome(detection_ms=[10.1]), Target(10, 20))
    assert not within(outcome(gap_ms=[]), Target(10, 20))
    assert not within(outcome(), Target(figures={"deaths": 2}))
    assert not within(outcome(figures={"deaths": [2.0, 3.0]}), Target(figures={"deaths": 2}))
    assert within(outcome(gap_ms=[]), Target(10))


def test_percentiles_are_of_nearest_rank() -> None:
    assert percentiles([]) is None
    assert percentiles([float(value) for value in range(100)]) == {"p50": 50.0, "p99": 99.0, "max": 99.0}


def test_outcomes_of_runs_add_up_in_the_report() -> None:
    total = Outcome()
    total.add(outcome(faults=Faults(lost=1), figures={"own": [1.0]}))
    total.add(outcome(faults=Faults(lost=2, wrong=1), figures={"own": [3.0]}, leaked_pages=4))
    report = summarise(total, Target(100))
    assert (report["runs"], report["lost"], report["wrong"], report["leaked_pages"]) == (2, 3, 1, 4)
    assert report["figures"]["own"]["max"] == 3.0
    assert report["target"] == {"detection_ms": 100}
