"""The table of requests: places, ids, and how long an ended request is kept."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from gateway.generation_spec import RequestKey
from gateway.streams import StreamTable
from meshkit.errors import AlreadyExists, NotFound, ResourceExhausted


def key(request_id: str, owner: str = "") -> RequestKey:
    return RequestKey(owner, request_id)


class Named:
    """All that the table looks at in a request."""

    def __init__(self, request_id: str, owner: str = "", *, prompt_tokens: int = 1) -> None:
        self.spec = self
        self.prompt_tokens = prompt_tokens
        self.request_id = request_id
        self.key = key(request_id, owner)
        self.ended_well = True


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def start(table: StreamTable, request_id: str, owner: str = "", *, prompt_tokens: int = 1) -> Any:
    request: Any = Named(request_id, owner, prompt_tokens=prompt_tokens)
    table.reserve(request.spec.key)
    table.add(request)
    return request


def test_an_id_is_taken_from_its_reservation_to_its_end() -> None:
    table = StreamTable(max_live=10, keep_finished_s=30)
    table.reserve(key("a"))
    with pytest.raises(AlreadyExists):
        table.reserve(key("a"))
    table.release(key("a"))
    request = start(table, "a")
    with pytest.raises(AlreadyExists):
        table.reserve(key("a"))
    table.retire(request, keep=True)
    table.reserve(key("a"))


def test_reserved_and_live_requests_share_the_places() -> None:
    table = StreamTable(max_live=2, keep_finished_s=30)
    live = start(table, "a")
    table.reserve(key("b"))
    with pytest.raises(ResourceExhausted) as caught:
        table.reserve(key("c"))
    assert caught.value.retry_after_s is not None
    table.retire(live, keep=True)
    table.reserve(key("c"))


def test_an_ended_request_is_found_until_its_time_is_over() -> None:
    clock = Clock()
    table = StreamTable(max_live=10, keep_finished_s=30, clock=clock)
    request = start(table, "a")
    assert table.find(key("a")) is request
    table.retire(request, keep=True)
    assert table.find_live(key("a")) is None
    clock.now += 29.9
    assert table.find(key("a")) is request
    clock.now += 0.2
    with pytest.raises(NotFound, match="30 s"):
        table.find(key("a"))


def test_a_refused_request_is_not_kept() -> None:
    table = StreamTable(max_live=10, keep_finished_s=30)
    table.retire(start(table, "a"), keep=False)
    with pytest.raises(NotFound):
        table.find(key("a"))


def test_no_more_ended_requests_are_kept_than_may_live() -> None:
    table = StreamTable(max_live=3, keep_finished_s=1e9)
    for number in range(10):
        table.retire(start(table, str(number)), keep=True)
    found = []
    for number in range(10):
        try:
            found.append(table.find(key(str(number))).spec.request_id)
        except NotFound:
            continue
    assert found == ["7", "8", "9"]


def test_an_id_used_again_means_the_new_request() -> None:
    table = StreamTable(max_live=3, keep_finished_s=30)
    first = start(table, "a")
    table.retire(first, keep=True)
    second = start(table, "a")
    assert table.find(key("a")) is second
    table.retire(first, keep=True)
    assert table.find_live(key("a")) is second
    table.retire(second, keep=True)
    table.retire(second, keep=True)
    assert table.find(key("a")) is second


async def test_a_request_that_is_being_started_is_waited_for() -> None:
    table = StreamTable(max_live=3, keep_finished_s=30)
    for is_taken in (True, False):
        table.reserve(key("a"))
        finding = asyncio.create_task(table.find_again(key("a")))
        await asyncio.sleep(0)
        assert not finding.done()
        request: Any = Named("a")
        if is_taken:
            table.add(request)
            assert await finding == request
            table.retire(request, keep=False)
        else:
            table.release(key("a"))
            assert await finding is None


async def test_only_what_lives_or_ended_well_a_short_while_ago_is_followed_again() -> None:
    clock = Clock()
    table = StreamTable(max_live=3, keep_finished_s=30, clock=clock)
    assert await table.find_again(key("a")) is None
    request = start(table, "a")
    assert await table.find_again(key("a")) == request
    table.retire(request, keep=True)
    assert await table.find_again(key("a")) == request
    request.ended_well = False
    assert await table.find_again(key("a")) is None
    request.ended_well = True
    clock.now += 31
    assert await table.find_again(key("a")) is None


async def test_each_owner_has_ids_of_its_own_and_another_owners_requests_are_not_there() -> None:
    table = StreamTable(max_live=10, keep_finished_s=30)
    ours = start(table, "a", "team-a")
    with pytest.raises(NotFound) as unknown:
        table.find(key("b", "team-b"))
    for is_live in (True, False):
        if not is_live:
            table.retire(ours, keep=True)
        assert table.find(key("a", "team-a")) is ours
        assert await table.find_again(key("a", "team-b")) is None
        assert table.find_live(key("a", "team-b")) is None
        with pytest.raises(NotFound) as caught:
            table.find(key("a", "team-b"))
        assert caught.value.message == unknown.value.message.replace("'b'", "'a'")
    theirs = start(table, "a", "team-b")
    assert table.find(key("a", "team-b")) is theirs
    assert table.find(key("a", "team-a")) is ours


def test_places_are_counted_by_owner() -> None:
    table = StreamTable(max_live=10, keep_finished_s=30)
    requests = [start(table, name, "team-a") for name in ("a", "b")]
    table.reserve(key("a", "team-b"))
    assert [table.busy_count_of(owner) for owner in ("team-a", "team-b", "team-c")] == [2, 1, 0]
    table.retire(requests[0], keep=True)
    table.retire(requests[0], keep=True)
    table.release(key("a", "team-b"))
    table.release(key("a", "team-b"))
    assert [table.busy_count_of(owner) for owner in ("team-a", "team-b")] == [1, 0]
    assert table.busy_count == 1


def test_places_that_one_owner_has_taken_are_not_all_gone_for_another() -> None:
    table = StreamTable(max_live=4, keep_finished_s=30)
    for number in range(4):
        table.reserve(key(f"flood-{number}", "flood"))
    with pytest.raises(ResourceExhausted):
        table.reserve(key("flood-4", "flood"))
    table.reserve(key("a", "other"))
    table.reserve(key("b", "other"))
    with pytest.raises(ResourceExhausted):
        table.reserve(key("c", "other"))  # Two of four is its share.


def test_prompt_tokens_of_live_requests_are_bounded_and_free_again_at_their_end() -> None:
    table = StreamTable(max_live=10, max_prompt_tokens=100, keep_finished_s=30)
    table.check_prompt("", 5000)  # One alone may be larger than the bound.
    large = start(table, "a", prompt_tokens=80)
    table.check_prompt("", 20)
    with pytest.raises(
        ResourceExhausted, match="80 prompt tokens are live at this gateway, the limit is 100"
    ):
        table.check_prompt("", 21)
    table.retire(large, keep=False)
    table.check_prompt("", 21)


def test_a_refused_one_is_told_the_time_in_which_places_become_free() -> None:
    clock = Clock()
    table = StreamTable(max_live=1, keep_finished_s=30, clock=clock)
    for _ in range(40):  # Each takes four seconds.
        request = start(table, "a")
        clock.now += 4.0
        table.retire(request, keep=False)
    table.reserve(key("a"))
    waits = []
    for _ in range(2):
        with pytest.raises(ResourceExhausted) as refused:
            table.reserve(key("b"))
        waits.append(refused.value.retry_after_s)
    assert waits == pytest.approx([4.0, 8.0])
