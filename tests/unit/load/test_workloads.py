"""Workloads: lengths are exact, prefixes really shared, and a seed gives the same requests each time."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from meshkit.errors import InvalidArgument
from meshkit.load import (
    LoadRequest,
    multi_turn,
    random_tokens,
    shared_prefix,
    spread_arrivals,
    tree_of_thought,
)
from meshkit.load.workloads import tree_size

SMALL = st.integers(min_value=1, max_value=6)
LENGTH = st.integers(min_value=1, max_value=40)
# Large enough that two draws of many tokens are never equal by chance.
VOCABULARY = 1 << 30
MAKERS: list[tuple[Callable[..., list[LoadRequest]], int, dict[str, int]]] = [
    (random_tokens, 3, {"prompt_tokens": 4}),
    (shared_prefix, 2, {"requests": 5, "prefix_tokens": 4, "own_tokens": 3}),
    (multi_turn, 2, {"turns": 3, "turn_tokens": 4}),
    (tree_of_thought, 2, {"branches": 2, "depth": 2, "root_tokens": 4, "thought_tokens": 3}),
]
SHAPE = {"output_tokens": 2, "vocab_size": VOCABULARY}


def prompt(request: LoadRequest) -> tuple[int, ...]:
    assert request.token_ids is not None
    return request.token_ids


@given(SMALL, LENGTH, LENGTH, st.integers(min_value=1, max_value=100), st.integers())
def test_random_prompts_have_their_length_and_vocabulary(
    requests: int, prompt_tokens: int, output_tokens: int, vocab_size: int, seed: int
) -> None:
    made = random_tokens(
        requests, prompt_tokens=prompt_tokens, output_tokens=output_tokens, vocab_size=vocab_size, seed=seed
    )
    assert len(made) == requests
    assert {len(prompt(each)) for each in made} == {prompt_tokens}
    assert {each.max_tokens for each in made} == {output_tokens}
    assert all(0 <= token < vocab_size for each in made for token in prompt(each))


@given(SMALL, SMALL, LENGTH, LENGTH, st.integers())
def test_a_group_shares_its_prefix_and_nothing_more(
    groups: int, per_group: int, prefix_tokens: int, own_tokens: int, seed: int
) -> None:
    made = shared_prefix(
        groups,
        requests=groups * per_group,
        prefix_tokens=prefix_tokens,
        own_tokens=own_tokens,
        seed=seed,
        **SHAPE,
    )
    prefixes = Counter(prompt(each)[:prefix_tokens] for each in made)
    assert len(prefixes) == groups
    assert set(prefixes.values()) == {per_group}
    assert {len(prompt(each)) for each in made} == {prefix_tokens + own_tokens}
    assert len({prompt(each)[prefix_tokens] for each in made}) == len(made)


@given(SMALL, SMALL, LENGTH, st.integers(min_value=0, max_value=20))
def test_sessions_share_the_system_prompt_and_go_turn_by_turn(
    sessions: int, turns: int, turn_tokens: int, system_tokens: int
) -> None:
    made = multi_turn(sessions, turns=turns, turn_tokens=turn_tokens, system_tokens=system_tokens, **SHAPE)
    assert len(made) == sessions * turns
    assert set(Counter(each.session for each in made).values()) == {turns}
    first, later = made[:sessions], made[sessions:]
    assert len({each.session for each in first}) == sessions
    assert len({prompt(each)[:system_tokens] for each in first}) == 1
    assert {len(prompt(each)) for each in first} == {system_tokens + turn_tokens}
    assert all(len(prompt(each)) == turn_tokens for each in later)


@given(SMALL, st.integers(min_value=1, max_value=3), st.integers(min_value=0, max_value=3), LENGTH, LENGTH)
def test_each_node_of_a_tree_but_the_root_has_its_parent_before_it(
    trees: int, branches: int, depth: int, root_tokens: int, thought_tokens: int
) -> None:
    made = tree_of_thought(
        trees, branches=branches, depth=depth, root_tokens=root_tokens, thought_tokens=thought_tokens, **SHAPE
    )
    assert len(made) == trees * tree_size(branches, depth)
    children: Counter[tuple[int, ...]] = Counter()
    seen: set[tuple[int, ...]] = set()
    for each in made:
        if len(prompt(each)) > root_tokens:
            parent = prompt(each)[:-thought_tokens]
            assert parent in seen
            children[parent] += 1
        seen.add(prompt(each))
    assert len(seen) == len(made)
    assert set(children.values()) <= {branches}
    assert max(len(prompt(each)) for each in made) == root_tokens + depth * thought_tokens


@pytest.mark.parametrize(("make", "count", "shape"), MAKERS)
def test_a_seed_gives_the_same_requests_and_another_seed_others(
    make: Callable[..., list[LoadRequest]], count: int, shape: dict[str, int]
) -> None:
    made = [make(count, **shape, **SHAPE, seed=seed) for seed in (5, 5, 6)]
    assert made[0] == made[1]
    assert all(one != other for one, other in zip(made[0], made[2], strict=True))


@pytest.mark.parametrize(("make", "count", "shape"), MAKERS)
def test_a_number_below_one_is_refused_by_name(
    make: Callable[..., list[LoadRequest]], count: int, shape: dict[str, int]
) -> None:
    for field in (*shape, *SHAPE):
        with pytest.raises(InvalidArgument) as refused:
            make(count, **{**shape, **SHAPE, field: -1})
        assert refused.value.field == field
    with pytest.raises(InvalidArgument):
        make(0, **shape, **SHAPE)


def some_requests(count: int) -> list[LoadRequest]:
    return random_tokens(count, prompt_tokens=1, output_tokens=1, vocab_size=9)


def gaps_of(burstiness: float) -> list[float]:
    spread = spread_arrivals(some_requests(4000), request_rate=20, burstiness=burstiness, seed=1)
    times = [0.0, *(each.at_s for each in spread if each.at_s is not None)]
    assert len(times) == 4001
    return [later - earlier for earlier, later in itertools.pairwise(times)]


def test_arrivals_come_at_the_rate_and_as_evenly_as_asked() -> None:
    for burstiness in (0.25, 1.0, 4.0):
        gaps = gaps_of(burstiness)
        assert min(gaps) >= 0
        assert statistics.fmean(gaps) == pytest.approx(1 / 20, rel=0.1)
        # A gamma distribution of shape k has a coefficient of variation of 1 / sqrt(k).
        assert statistics.pstdev(gaps) * 20 == pytest.approx(1 / math.sqrt(burstiness), rel=0.1)


def test_an_infinite_rate_sends_all_at_once() -> None:
    assert {each.at_s for each in spread_arrivals(some_requests(5), request_rate=math.inf)} == {0.0}


def test_later_turns_of_a_session_draw_no_arrival_of_their_own() -> None:
    requests = multi_turn(3, turns=4, turn_tokens=1, **SHAPE)
    spread = spread_arrivals(requests, request_rate=10, seed=2)
    assert len({each.at_s for each in spread}) == 3
    assert spread_arrivals(requests, request_rate=10, seed=2) == spread


@pytest.mark.parametrize(
    ("numbers", "field"),
    [
        ({"request_rate": 0.0}, "request_rate"),
        ({"request_rate": -1.0}, "request_rate"),
        ({"request_rate": math.nan}, "request_rate"),
        ({"request_rate": 1.0, "burstiness": 0.0}, "burstiness"),
        ({"request_rate": 1.0, "burstiness": math.inf}, "burstiness"),
    ],
)
def test_a_rate_that_is_none_is_refused(numbers: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        spread_arrivals(some_requests(1), **numbers)
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({}, "prompt"),
        ({"text": ""}, "prompt"),
        ({"token_ids": ()}, "prompt"),
        ({"text": "a", "token_ids": (1,)}, "prompt"),
        ({"text": "a", "max_tokens": 0}, "max_tokens"),
        ({"text": "a", "at_s": -1.0}, "at_s"),
        ({"text": "a", "at_s": math.nan}, "at_s"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(InvalidArgument) as refused:
        LoadRequest(**{"max_tokens": 1, **fields})
    assert refused.value.field == field
