"""Watchers of a change feed miss nothing and wait for nothing that has been."""

from __future__ import annotations

import asyncio

from scheduler_svc.change_feed import ChangeFeed


async def test_a_watcher_that_is_behind_goes_on_at_once() -> None:
    feed = ChangeFeed()
    feed.bump()
    assert await feed.wait_beyond(0) == 2


async def test_every_waiting_watcher_wakes_at_a_change() -> None:
    feed = ChangeFeed()
    watchers = [asyncio.create_task(feed.wait_beyond(feed.revision)) for _ in range(3)]
    done, _ = await asyncio.wait(watchers, timeout=0.01)
    assert not done
    feed.bump()
    assert await asyncio.gather(*watchers) == [2, 2, 2]


async def test_changes_between_two_waits_count_once() -> None:
    feed = ChangeFeed()
    seen = await feed.wait_beyond(0)
    feed.bump()
    feed.bump()
    assert await feed.wait_beyond(seen) == 3
