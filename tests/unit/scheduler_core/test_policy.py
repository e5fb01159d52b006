from __future__ import annotations

import pytest

from scheduler_svc.core.errors import UnknownPolicy
from scheduler_svc.core.policy import POLICIES, RandomOrder, make_policy
from scheduler_svc.core.structures import Placed, Request
from tests.unit.scheduler_core.simulated_executor import Drive, make_limits, make_request


def order_of_admission(policy: str, warm: list[int], requests: list[Request]) -> list[int]:
    """Which of `requests` enter the one slot first, after `warm` was cached."""
    drive = Drive(make_limits(page_size=4, page_count=200, max_running_requests=1), policy=policy)
    drive.add(make_request(warm, 1))
    drive.finish()
    drive.add(*requests)
    drive.finish()
    placed = [event.request for event in drive.events if isinstance(event, Placed)]
    return [requests.index(request) for request in placed if request in requests]


WARM = list(range(40))
SHORT = [50, 51, 52]
HALF_CACHED = [*range(20), *range(60, 64)]
ALL_CACHED = list(range(40))


def three() -> list[Request]:
    return [make_request(SHORT, 2), make_request(HALF_CACHED, 9), make_request(ALL_CACHED, 5)]


def test_fcfs_admits_in_the_order_of_arrival() -> None:
    assert order_of_admission("fcfs", WARM, three()) == [0, 1, 2]


def test_lpm_admits_the_longest_cached_prefix_first() -> None:
    assert order_of_admission("lpm", WARM, three()) == [2, 1, 0]


def test_shortest_prefill_first_counts_only_tokens_that_are_not_cached() -> None:
    # 3 tokens, 24 of which 20 are cached, and 40 of which 36 may be taken from the cache.
    assert order_of_admission("shortest-prefill-first", WARM, three()) == [0, 1, 2]
    longer = [make_request(range(70, 80), 2), *three()[1:]]
    assert order_of_admission("shortest-prefill-first", WARM, longer) == [1, 2, 0]


def test_lof_admits_the_longest_output_first() -> None:
    assert order_of_admission("lof", WARM, three()) == [1, 2, 0]


def test_random_is_the_same_for_the_same_seed_and_another_for_another() -> None:
    request = make_request([1])
    first, again, other = ([policy.rank(request, 0) for _ in range(5)]
                           for policy in (RandomOrder(3), RandomOrder(3), RandomOrder(4)))  # fmt: skip
    assert first == again != other


@pytest.mark.parametrize("policy", POLICIES)
def test_priority_comes_before_any_policy(policy: str) -> None:
    requests = [*three(), make_request(range(80, 120), 3, priority=5)]
    assert order_of_admission(policy, WARM, requests)[0] == 3


def test_an_unknown_policy_is_refused_with_those_known() -> None:
    with pytest.raises(
        UnknownPolicy, match=r"'lifo' is unknown; known are: dfs-weight, fcfs, hrrn, lof, lpm, random, sh"
    ):
        make_policy("lifo")
