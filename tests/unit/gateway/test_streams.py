"""The table of requests: places, ids, and how long an ended request is kept."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.streams import StreamTable
from meshkit.errors import AlreadyExists, NotFound, ResourceExhausted


class Named:
    """All that the table looks at in a request."""

    def __init__(self, request_id: str) -> None:
        self.spec = self
        self.request_id = request_id
        self.ended_well = True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def start(table: StreamTable, request_id: str) -> Any:
    request: Any = Named(request_id)
    table.reserve(request_id)
    table.add(request)
    return request


def test_an_id_is_taken_from_its_reservation_to_its_end() -> None:
    table = StreamTable(max_live=10, keep_finished_s=30)
    table.reserve("a")
    with pytest.raises(AlreadyExists):
        table.reserve("a")
    table.release("a")
    request = start(table, "a")
    with pytest.raises(AlreadyExists):
        table.reserve("a")
    table.retire(request, keep=True)
    table.reserve("a")


def test_reserved_and_live_requests_share_the_places() -> None:
    table = StreamTable(max_live=2, keep_finished_s=30)
    live = start(table, "a")
    table.reserve("b")
    with pytest.raises(ResourceExhausted) as caught:
        table.reserve("c")
    assert caught.value.retry_after_s == 1.0
    table.retire(live, keep=True)
    table.reserve("c")


def test_an_ended_request_is_found_until_its_time_is_over() -> None:
    clock = Clock()
    table = StreamTable(max_live=10, keep_finished_s=30, clock=clock)
    request = start(table, "a")
    assert table.find("a") is request
    table.retire(request, keep=True)
    assert table.find_live("a") is None
    clock.now += 29.9
    assert table.find("a") is request
    clock.now += 0.2
    with pytest.raises(NotFound, match="30 s"):
        table.find("a")


def test_a_refused_request_is_not_kept() -> None:
    table = StreamTable(max_live=10, keep_finished_s=30)
    table.retire(start(table, "a"), keep=False)
    with pytest.raises(NotFound):
        table.find("a")


def test_no_more_ended_requests_are_kept_than_may_live() -> None:
    table = StreamTable(max_live=3, keep_finished_s=1e9)
    for number in range(10):
        table.retire(start(table, str(number)), keep=True)
    found = []
    for number in range(10):
        try:
            found.append(table.find(str(number)).spec.request_id)
        except NotFound:
            continue
    assert found == ["7", "8", "9"]


def test_an_id_used_again_means_the_new_request() -> None:
    table = StreamTable(max_live=3, keep_finished_s=30)
    first = start(table, "a")
    table.retire(first, keep=True)
    second = start(table, "a")
    assert table.find("a") is second
    table.retire(first, keep=True)
    assert table.find_live("a") is second
    table.retire(second, keep=True)
    table.retire(second, keep=True)
    assert table.find("a") is second


async def test_a_request_that_is_being_started_is_waited_for() -> None:
    table = StreamTable(max_live=3, keep_finished_s=30)
    for is_taken in (True, False):
        table.reserve("a")
        finding = asyncio.create_task(table.find_again("a"))
        await asyncio.sleep(0)
        assert not finding.done()
        request: Any = Named("a")
        if is_taken:
            table.add(request)
            assert await finding == request
            table.retire(request, keep=False)
        else:
            table.release("a")
            assert await finding is None


async def test_only_what_lives_or_ended_well_a_short_while_ago_is_followed_again() -> None:
    clock = Clock()
    table = StreamTable(max_live=3, keep_finished_s=30, clock=clock)
    assert await table.find_again("a") is None
    request = start(table, "a")
    assert await table.find_again("a") == request
    table.retire(request, keep=True)
    assert await table.find_again("a") == request
    request.ended_well = False
    assert await table.find_again("a") is None
    request.ended_well = True
    clock.now += 31
    assert await table.find_again("a") is None
