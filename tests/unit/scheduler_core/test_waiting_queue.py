from __future__ import annotations

import itertools
import random

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from scheduler_svc.core.neighbours import WORTHWHILE_TOKENS
from scheduler_svc.core.policy import POLICIES, make_policy
from scheduler_svc.core.radix_tree import OPEN, PrefixMatch
from scheduler_svc.core.seat import Ticket
from scheduler_svc.core.structures import Request
from scheduler_svc.core.waiting_order import ResponseRatioOrder
from scheduler_svc.core.waiting_queue import PATIENCE
from tests.unit.scheduler_core.simulated_executor import Drive, make_limits, make_request

CACHE_POLICIES = sorted(name for name in POLICIES if make_policy(name).depends_on_cache)


# ---------------------------------------------------------------- hrrn


def waiting_ticket(tokens: int, *, since: int, cached: int = 0, priority: int = 0) -> Ticket:
    request = make_request(range(tokens), 4, priority=priority)
    ticket = Ticket.of(request, budget=4)
    ticket.waits_since, ticket.cached_tokens = since, cached
    ticket.match = PrefixMatch(OPEN, None, 0)
    return ticket


def test_hrrn_takes_the_short_one_of_two_that_came_together_and_in_time_a_long_one_that_waited() -> None:
    order = ResponseRatioOrder()
    long, short = waiting_ticket(100, since=0), waiting_ticket(10, since=0)
    for ticket in (long, short):
        order.add(ticket)
    assert list(order.in_order(50)) == [short, long]
    order.discard(short)
    fresh = waiting_ticket(10, since=45)
    order.add(fresh)
    assert list(order.in_order(49)) == [long, fresh]  # 49 / 100 and 4 / 10
    assert list(order.in_order(50)) == [long, fresh]  # Equal ratios: by age.
    assert list(order.in_order(51)) == [fresh, long]  # 51 / 100 and 6 / 10


def test_hrrn_counts_only_tokens_that_are_not_cached_and_higher_priorities_come_first() -> None:
    order = ResponseRatioOrder()
    uncached, cached = waiting_ticket(100, since=0), waiting_ticket(100, since=0, cached=96)
    urgent = waiting_ticket(5000, since=9, priority=1)
    for ticket in (uncached, cached, urgent):
        order.add(ticket)
    assert list(order.in_order(10)) == [urgent, cached, uncached]


@given(st.lists(st.tuples(st.integers(1, 50), st.integers(0, 20), st.booleans()), max_size=150))
def test_the_rows_of_hrrn_are_those_of_its_requests_whoever_comes_and_goes(
    moves: list[tuple[int, int, bool]],
) -> None:
    order, here = ResponseRatioOrder(), dict[Ticket, None]()
    for tokens, since, leaves in moves:
        ticket = waiting_ticket(tokens, since=since)
        order.add(ticket)
        here[ticket] = None
        if leaves:
            gone = next(itertools.islice(here, len(here) // 2, None))
            order.discard(gone)
            del here[gone]
    expected = sorted(
        here, key=lambda ticket: (-(30 - ticket.waits_since) / ticket.request.length, ticket.request.id)
    )
    assert list(order.in_order(30)) == expected


# ---------------------------------------------------------------- dfs-weight


def test_dfs_weight_serves_the_heaviest_subtree_first_and_stays_in_it_to_its_end() -> None:
    drive = Drive(make_limits(page_size=4, page_count=400, max_running_requests=1), policy="dfs-weight")
    light, heavy = list(range(16)), list(range(20, 36))
    heavier_branch = [*heavy, *range(40, 48)]
    for warm in (light, heavier_branch, [*heavy, *range(50, 58)]):
        drive.add(make_request(warm, 1))
        drive.finish()
    requests = [
        make_request([99, 98], 2),
        make_request([*light, 1], 2),
        make_request([*heavy, 2], 2),
        make_request([*heavy, *range(50, 58), 3], 2),
        make_request([*heavier_branch, 4], 2),
        make_request([*light, 5], 2),
        make_request([*heavier_branch, 6], 2),
    ]
    drive.events.clear()
    drive.add(*requests)
    drive.finish()
    # Below `heavy` wait four: first the branch with two, then that with one, then its own; then `light`.
    assert [requests.index(request) for request in drive.order_of_admission()] == [4, 6, 3, 2, 1, 5, 0]


# ---------------------------------------------------------------- no rematch of all


@pytest.mark.parametrize("policy", CACHE_POLICIES)
def test_with_4096_waiting_only_those_are_looked_up_again_whose_prefix_changed(policy: str) -> None:
    limits = make_limits(page_size=4, page_count=20_000, max_running_requests=4, chunk_tokens=64)
    drive = Drive(limits, policy=policy, depth=1)
    texts = [[text, *range(1, 24)] for text in range(64)]
    drive.add(*(make_request([*texts[n % 64], n], 3) for n in range(4096)))
    looked_up = 0
    find = drive.batcher._pool.find

    def counted(key: bytes, **arguments: object) -> PrefixMatch:
        nonlocal looked_up
        looked_up += 1
        return find(key, **arguments)  # type: ignore[arg-type]

    drive.batcher._pool.find = counted  # type: ignore[method-assign]
    drive.run(until=lambda: len(drive.ended) >= 40)
    # Each of some ten texts came into the cache while 63 others waited for it: once when its first page
    # did, and once more where a node was split. Looking all up at every one of the 30 steps is 120,000.
    assert looked_up < 64 * 64 / 2


def test_a_thousand_that_wait_for_a_neighbours_prefix_cost_nothing_while_it_computes() -> None:
    limits = make_limits(page_size=4, page_count=4000, max_running_requests=4, chunk_tokens=40)
    drive = Drive(limits, depth=1)
    prefix = [7 * n % 61 for n in range(400)]
    drive.add(*(make_request([*prefix, n], 2) for n in range(1000)))
    drive.plan()
    looked_at = 0
    keeps_waiting = drive.batcher._neighbours.keeps_waiting

    def counted(ticket: Ticket, match: PrefixMatch) -> bool:
        nonlocal looked_at
        looked_at += 1
        return keeps_waiting(ticket, match)

    drive.batcher._neighbours.keeps_waiting = counted  # type: ignore[method-assign]
    for _ in range(8):
        drive.apply()
        drive.plan()
    assert looked_at == 0
    drive.finish()
    assert drive.executor.computed_tokens == 400 + 1000


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_new_prefix_is_computed_once_under_every_policy(policy: str) -> None:
    drive = Drive(make_limits(page_count=400, chunk_tokens=64), policy=policy)
    prefixes = [[(7 + text) * n % 61 for n in range(128)] for text in range(3)]
    requests = [make_request([*prefixes[n % 3], n, n + 1], 4) for n in range(12)]
    drive.add(*requests)
    drive.finish()
    # Nobody waits for the last few tokens of a prefix; without awareness it would be 12 × 130 in all.
    assert drive.executor.computed_tokens < 3 * (128 + WORTHWHILE_TOKENS) + 12 * 2


# ---------------------------------------------------------------- ageing

TEXTS = [[(7 * text + position * (text + 3)) % 61 for position in range(96)] for text in range(3)]
Arrival = tuple[int, int, int, int]
ARRIVALS = st.tuples(st.integers(-2, 5), st.integers(0, 2), st.integers(1, 70), st.integers(1, 12))
"""Priority, text, tokens of it, output tokens."""


class Stream:
    """A queue that is never empty: whoever is admitted is replaced at once, by the adversary's wishes."""

    def __init__(self, drive: Drive, arrivals: list[Arrival], *, backlog: int) -> None:
        self.drive = drive
        self.backlog = backlog
        self._arrivals = itertools.cycle(arrivals)
        self._draw = random.Random(0)

    def arrive(self) -> Request:
        priority, text, length, output = next(self._arrivals)
        tail = [self._draw.randrange(61)]
        request = make_request([*TEXTS[text][:length], *tail], output, priority=priority)
        self.drive.add(request)
        return request

    def step(self) -> None:
        """One step of the replica; then the bound must hold for everybody who waits still."""
        while self.drive.batcher.waiting < self.backlog:
            self.arrive()
        while len(self.drive.results) < self.drive.depth and self.drive.plan() is not None:
            pass
        self.drive.apply()

    def longest_delay(self) -> int:
        """By how many admissions beyond its turn the one that was delayed longest waits now."""
        queue = self.drive.batcher._waiting
        return max((queue._departures - ticket.turn for ticket in queue), default=0)


@pytest.mark.parametrize("policy", sorted(POLICIES))
@settings(max_examples=max(30, settings().max_examples // 10))
@given(
    arrivals=st.lists(ARRIVALS, min_size=1, max_size=6),
    victim=ARRIVALS,
    patience=st.integers(0, 12),
    backlog=st.integers(1, 10),
    slots=st.integers(1, 5),
    tokens=st.sampled_from([128, 256, 2048]),
    depth=st.integers(1, 2),
    preemption=st.booleans(),
    conservativeness=st.sampled_from([0.0, 1.0]),
)
def test_under_a_constant_stream_nobody_is_admitted_much_after_its_turn(
    policy: str, arrivals: list[Arrival], victim: Arrival, patience: int, backlog: int, slots: int,
    tokens: int, depth: int, preemption: bool, conservativeness: float,
) -> None:  # fmt: skip
    limits = make_limits(
        page_size=4,
        page_count=tokens // 4,
        max_running_requests=slots,
        chunk_tokens=32,
        priority_preemption=preemption,
    )
    drive = Drive(limits, policy=policy, depth=depth, patience=patience, conservativeness=conservativeness)
    stream = Stream(drive, arrivals, backlog=backlog)
    for _ in range(5):
        stream.step()
    priority, text, length, output = victim
    request = make_request([*TEXTS[text][:length], 60], output, priority=priority - 10)
    drive.add(request)
    queued = drive.batcher.waiting
    admitted_before = len(drive.order_of_admission())
    for _ in range(4000):
        if drive.placed(request):
            break
        stream.step()
        assert stream.longest_delay() <= patience + 1
    # Those before it in the queue, and as many of the others as may pass it.
    admitted = drive.order_of_admission()[admitted_before:]
    assert admitted.index(request) <= queued + patience + 1
    for _ in range(4000):
        if request.id in drive.ended:
            break
        stream.step()
        assert stream.longest_delay() <= patience + 1
    assert drive.reason(request) == "length"
    drive.finish()


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_without_ageing_higher_priorities_would_keep_a_request_waiting_for_ever(policy: str) -> None:
    """The adversary of the test above is one: what it proves is the ageing's doing."""
    limits = make_limits(max_running_requests=1)
    for patience, is_admitted in ((10**9, False), (PATIENCE, True)):
        drive = Drive(limits, policy=policy, patience=patience)
        stream = Stream(drive, [(1, 0, 3, 1)], backlog=3)
        request = make_request([50, 51], 1)
        drive.add(request)
        for _ in range(3 * PATIENCE):
            stream.step()
        assert bool(drive.placed(request)) == is_admitted


def test_overdue_requests_go_in_order_of_arrival_and_the_first_is_not_late_by_the_second() -> None:
    drive = Drive(make_limits(max_running_requests=1), policy="lof", patience=3)
    short = [make_request([n], 1) for n in range(4)]
    drive.add(*short)
    drive.add(*(make_request([50 + n], 5) for n in range(8)))
    drive.finish()
    order = drive.order_of_admission()
    # Admissions 0 to 2 are by policy. Then each short one is overdue once three have gone beyond its turn.
    assert [order.index(request) for request in short] == [3, 4, 5, 6]


def test_whoever_was_admitted_as_overdue_keeps_its_slot_against_any_priority() -> None:
    limits = make_limits(max_running_requests=1, priority_preemption=True)
    drive = Drive(limits, patience=2)
    patient = make_request([50, 51], 30)
    stream = Stream(drive, [(5, 0, 3, 1)], backlog=2)
    stream.step()
    drive.add(patient)
    for _ in range(400):
        stream.step()
    assert patient.id in drive.ended
    assert len(drive.placed(patient)) == 1
