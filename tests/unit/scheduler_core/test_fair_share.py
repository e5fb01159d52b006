from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import hypothesis.strategies as st
import pytest
from hypothesis import given

from scheduler_svc.core.errors import QueueFull
from scheduler_svc.core.fair_share import OUTPUT_WEIGHT, FairShare
from scheduler_svc.core.mesh import MeshCore
from scheduler_svc.core.policy import POLICIES
from scheduler_svc.core.queue_bounds import QueueBounds, QueueTally
from scheduler_svc.core.structures import Placed, Request
from scheduler_svc.core.waiting_queue import PATIENCE
from tests.unit.scheduler_core.simulated_executor import Drive, make_limits, make_request


def owned(owner: str, prompt: Sequence[int], output_tokens: int = 2, *, priority: int = 0) -> Request:
    request = make_request(prompt, output_tokens, priority=priority, salt=owner)
    request.owner = owner
    return request


def placed_owners(drive: Drive) -> list[str]:
    """Owners of the requests in the order in which they got a slot."""
    return [event.request.owner for event in drive.events if isinstance(event, Placed)]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_flood_of_one_owner_does_not_hold_up_another_under_any_policy(policy: str) -> None:
    drive = Drive(make_limits(max_running_requests=1, page_count=200), policy=policy)
    draws = random.Random(1)
    flood = [owned("flood", [draws.randrange(64) for _ in range(8)]) for _ in range(40)]
    drive.add(*flood)
    drive.add(*(owned("small", [draws.randrange(64) for _ in range(8)]) for _ in range(5)))
    drive.finish()
    order = placed_owners(drive)
    assert Counter(order) == {"flood": 40, "small": 5}
    # Of equal requests one each in turn, from the first on: all five are through within the first eleven.
    assert Counter(order[:11])["small"] == 5


def test_an_overdue_backlog_does_not_go_before_other_owners() -> None:
    drive = Drive(make_limits(max_running_requests=1, page_count=200))
    drive.add(*(owned("flood", [n % 64, n // 64]) for n in range(3 * PATIENCE)))
    late: list[Request] = []
    for number in range(2 * PATIENCE):
        late.append(owned("late", [1, number % 64]))
        drive.add(late[-1])
    drive.finish()
    order = placed_owners(drive)
    # Long after the flood's requests have become overdue, the other one still has every second turn.
    window = order[3 * PATIENCE : 3 * PATIENCE + 100]
    assert 45 <= Counter(window)["late"] <= 55


def test_a_higher_priority_goes_first_whosever_it_is_until_the_others_are_overdue() -> None:
    drive = Drive(make_limits(max_running_requests=1, page_count=200))
    drive.add(owned("calm", [7, 7]))
    drive.add(*(owned("urgent", [n % 64, n // 64], priority=1) for n in range(2 * PATIENCE)))
    drive.finish()
    turn = placed_owners(drive).index("calm")
    assert PATIENCE <= turn <= PATIENCE + 1


def test_what_an_owner_was_served_counts_prompt_and_output_tokens() -> None:
    drive = Drive(make_limits(max_running_requests=1, page_count=400))
    for number in range(20):
        drive.add(owned("long", [number, *range(1, 31)], 2), owned("short", [number, 1, 2], 2))
    drive.finish()
    order = placed_owners(drive)
    tokens = {"long": 31 + 2 * OUTPUT_WEIGHT, "short": 3 + 2 * OUTPUT_WEIGHT}
    first_half = Counter(order[: order.index("long", order.index("long") + 1) + 1])
    # While both wait, the one gets as many more turns as its requests are smaller.
    assert first_half["short"] >= tokens["long"] // tokens["short"]


def test_turns_are_not_saved_up_by_an_owner_that_waited_for_nothing() -> None:
    share = FairShare()
    share.enter("busy")
    share.charge("busy", prompt_tokens=1_000)
    share.enter("idle")
    assert share.served("idle") == share.served("busy") == 1_000
    share.leave("busy")
    share.leave("idle")
    share.enter("third")
    assert share.served("third") == 1_000


def test_accounts_that_tell_nothing_are_forgotten() -> None:
    share = FairShare()
    for number in range(5_000):
        share.enter(f"owner {number}")
        share.charge(f"owner {number}", prompt_tokens=1)
        share.leave(f"owner {number}")
    assert len(share) <= 1025


@given(
    st.lists(
        st.tuples(st.sampled_from("abc"), st.integers(1, 20), st.integers(-1, 1)), min_size=1, max_size=40
    ),
    st.sampled_from(sorted(POLICIES)),
)
def test_everybody_is_served_exactly_whoever_they_are(asked: list[tuple[str, int, int]], policy: str) -> None:
    drive = Drive(make_limits(max_running_requests=3, page_count=40), policy=policy)
    requests = [owned(owner, range(length), 3, priority=priority) for owner, length, priority in asked]
    drive.add(*requests)
    drive.finish()  # Every token is checked against the oracle on its way.
    assert sorted(placed_owners(drive)) == sorted(owner for owner, _, _ in asked)


# ---------------------------------------------------------------- bounds


def tally(**requests: Sequence[int]) -> QueueTally:
    made = QueueTally()
    for owner, sizes in requests.items():
        for tokens in sizes:
            made.add(owner, tokens)
    return made


def refuses(bounds: QueueBounds, tallies: Sequence[QueueTally], owner: str, tokens: int = 1) -> str:
    """The bound that has no room; "" where there is."""
    try:
        bounds.check(tallies, owner=owner, tokens=tokens)
    except QueueFull as error:
        return error.what
    return ""


def test_a_queue_that_one_owner_has_filled_is_not_full_for_another_up_to_its_share() -> None:
    bounds = QueueBounds(max_requests=8, max_tokens=1000)
    full = tally(flood=[1] * 8)
    assert refuses(bounds, [full], "flood") == "requests"
    assert refuses(bounds, [full], "other") == ""
    assert refuses(bounds, [full, tally(other=[1] * 3)], "other") == ""
    assert refuses(bounds, [full, tally(other=[1] * 4)], "other") == "requests"  # Half of 8 is its share.


def test_tokens_are_bounded_like_requests_and_one_request_alone_may_have_more() -> None:
    bounds = QueueBounds(max_requests=100, max_tokens=1000)
    assert refuses(bounds, [tally()], "a", tokens=5000) == ""
    assert refuses(bounds, [tally(a=[900])], "a", tokens=101) == "tokens"
    assert refuses(bounds, [tally(a=[900])], "a", tokens=100) == ""
    assert refuses(bounds, [tally(a=[1000])], "b", tokens=500) == ""
    assert refuses(bounds, [tally(a=[1000])], "b", tokens=501) == "tokens"


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(1, 30)), max_size=300))
def test_however_many_owners_there_are_at_most_twice_the_bounds_wait(arrivals: list[tuple[int, int]]) -> None:
    bounds, waiting = QueueBounds(max_requests=16, max_tokens=200), QueueTally()
    for owner, tokens in arrivals:
        if not refuses(bounds, [waiting], str(owner), tokens):
            waiting.add(str(owner), tokens)
    assert waiting.requests <= 32
    assert waiting.tokens <= 400


def test_a_tally_is_empty_again_when_all_have_left() -> None:
    made = tally(a=[1, 2], b=[3])
    for owner, tokens in (("a", 2), ("b", 3), ("a", 1)):
        made.remove(owner, tokens)
    assert (made.requests, made.tokens, dict(made.requests_of), dict(made.tokens_of)) == (0, 0, {}, {})


def test_a_mesh_without_replicas_counts_what_waits_and_forgets_what_is_cancelled() -> None:
    core = MeshCore(max_queued_requests=100, max_queued_tokens=10)
    core.configure_group("g", model="m", weight=1.0)
    first = owned("a", range(8))
    core.submit(first)
    with pytest.raises(QueueFull, match="8 tokens wait already; 10 may"):
        core.submit(owned("a", range(3)))
    core.cancel(first)
    core.submit(owned("a", range(3)))
