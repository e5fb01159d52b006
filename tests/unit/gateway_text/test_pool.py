"""The pool: bounded, cancellable, and out of the event loop's way."""

from __future__ import annotations

import asyncio
import contextvars
import threading
from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

from gateway.text import TextPool, Tokenizer
from meshkit.errors import ResourceExhausted


@pytest_asyncio.fixture
async def pool() -> AsyncIterator[TextPool]:
    pool = TextPool(threads=1, max_waiting=1)
    yield pool
    await pool.close()


async def test_a_call_gives_its_result_or_its_exception(pool: TextPool) -> None:
    assert await pool.run(int, "12", base=8) == 10
    with pytest.raises(ValueError, match="invalid literal"):
        await pool.run(int, "x")


async def test_a_full_queue_is_refused_and_room_comes_back(pool: TextPool) -> None:
    release = threading.Event()
    taken = [asyncio.create_task(pool.run(release.wait)) for _ in range(2)]
    await asyncio.sleep(0)
    with pytest.raises(ResourceExhausted):
        await pool.run(int, "1")
    release.set()
    assert await asyncio.gather(*taken) == [True, True]
    assert await pool.run(int, "1") == 1


async def test_a_cancelled_call_that_waited_never_runs_and_gives_its_place_back(pool: TextPool) -> None:
    release, ran = threading.Event(), threading.Event()
    running = asyncio.create_task(pool.run(release.wait))
    waiting = asyncio.create_task(pool.run(ran.set))
    await asyncio.sleep(0)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    follower = asyncio.create_task(pool.run(int, "3"))
    await asyncio.sleep(0)
    release.set()
    await running
    assert await follower == 3
    assert not ran.is_set()


async def test_the_callers_context_goes_along(pool: TextPool) -> None:
    variable: contextvars.ContextVar[str] = contextvars.ContextVar("variable")
    variable.set("trace")
    assert await pool.run(variable.get) == "trace"


async def test_a_prompt_of_200k_tokens_does_not_stall_the_loop(pool: TextPool, tokenizer: Tokenizer) -> None:
    text = "The quick brown fox jumps over the lazy dog. " * 20_000
    loop = asyncio.get_running_loop()
    job = asyncio.create_task(pool.run(tokenizer.encode, text, add_special_tokens=False))
    started = last = loop.time()
    longest_s = 0.0
    turns = 0
    while not job.done():
        await asyncio.sleep(0.001)
        now = loop.time()
        longest_s, last, turns = max(longest_s, now - last), now, turns + 1
    assert len(await job) == 200_000 + 1
    # A held interpreter lock would show as one gap as long as the whole job.
    assert turns > 20
    assert longest_s < (last - started) / 2
