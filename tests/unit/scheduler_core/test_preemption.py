from __future__ import annotations

import pytest

from scheduler_svc.core.structures import Request
from tests.unit.scheduler_core.simulated_executor import Drive, make_limits, make_request, oracle

DEPTHS = pytest.mark.parametrize("depth", [1, 2, 3])


def started(
    depth: int, *requests: Request, slots: int = 2, page_count: int = 64, threshold: int = 1
) -> Drive:
    """All of `requests` run already."""
    limits = make_limits(
        max_running_requests=slots,
        page_count=page_count,
        priority_preemption=True,
        preemption_threshold=threshold,
    )
    drive = Drive(limits, depth=depth, conservativeness=0)
    drive.add(*requests)
    drive.run(until=lambda: all(len(request.output) >= 3 for request in requests))
    return drive


@DEPTHS
def test_an_urgent_request_takes_the_slot_of_the_lowest_priority_which_goes_on_later(depth: int) -> None:
    low, lowest = make_request(range(8), 40), make_request(range(20, 28), 40, priority=-1)
    drive = started(depth, low, lowest)
    urgent = make_request(range(40, 44), 4, priority=3)
    drive.add(urgent)
    drive.run(until=lambda: bool(drive.placed(urgent)))
    assert lowest.id not in drive.ended
    assert drive.batcher.preempted_count == drive.batcher.retracted_count == 1
    drive.finish()
    assert [len(drive.placed(request)) for request in (low, lowest, urgent)] == [1, 2, 1]
    assert lowest.output == oracle(lowest.prompt, 40)
    assert drive.placed(lowest)[1].cached_tokens > 0


@DEPTHS
def test_it_takes_pages_too_from_no_more_requests_than_it_needs(depth: int) -> None:
    running = [make_request(range(20 * n, 20 * n + 12), 20) for n in range(3)]
    drive = started(depth, *running, slots=8, page_count=22)
    urgent = make_request(range(80, 120), 4, priority=1)
    drive.add(urgent)
    drive.run(until=lambda: bool(drive.placed(urgent)))
    assert drive.batcher.preempted_count == 1
    drive.finish()
    assert all(request.output == oracle(request.prompt, 20) for request in running)


@DEPTHS
@pytest.mark.parametrize(("priority", "threshold", "preempted"), [(0, 1, 0), (1, 1, 1), (1, 2, 0), (2, 2, 1)])
def test_only_a_priority_higher_by_the_threshold_preempts(
    depth: int, priority: int, threshold: int, preempted: int
) -> None:
    drive = started(depth, make_request(range(8), 40), slots=1, threshold=threshold)
    drive.add(make_request(range(40, 44), 4, priority=priority))
    drive.finish()
    assert drive.batcher.preempted_count == preempted


def test_nobody_gives_way_in_vain() -> None:
    high, low = make_request(range(100, 160), 20, priority=9), make_request(range(8), 20)
    drive = started(1, high, low, slots=4, page_count=24)
    drive.add(
        make_request(range(200, 280), 4, priority=5)
    )  # Even without `low` it would not fit beside `high`.
    drive.run(until=lambda: high.id in drive.ended)
    assert len(drive.placed(low)) == 1


def test_without_the_option_priorities_order_the_queue_only() -> None:
    drive = Drive(make_limits(max_running_requests=1))
    low, high = make_request(range(8), 12), make_request(range(20, 28), 12, priority=9)
    drive.add(low)
    drive.run(until=lambda: len(low.output) == 3)
    drive.add(high)
    drive.finish()
    assert drive.batcher.preempted_count == 0
    assert len(drive.placed(low)) == 1


@DEPTHS
def test_those_preempted_do_not_take_back_their_room_before_the_urgent_one_has_it(depth: int) -> None:
    low = [make_request(range(20 * n, 20 * n + 8), 30) for n in range(4)]
    drive = started(depth, *low, slots=4)
    urgent = [make_request(range(100 + 20 * n, 108 + 20 * n), 16, priority=2) for n in range(4)]
    drive.add(*urgent)
    drive.finish()
    assert drive.batcher.preempted_count == 4
    again = [drive.events.index(drive.placed(request)[1]) for request in low]
    assert max(drive.events.index(drive.placed(request)[0]) for request in urgent) < min(again)
