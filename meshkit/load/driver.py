"""Sends a workload at a target: closed loop (so many at once) or open loop (each at its time)."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any

from meshkit.errors import InvalidArgument, MeshError
from meshkit.load.request import LoadRequest, continue_conversation
from meshkit.load.sample import NOT_SENT, Sample
from meshkit.load.targets import Target

OnDone = Callable[[Sample], None]


@dataclass(frozen=True)
class Clock:
    """Where time comes from. now, cpu: seconds; sleep takes seconds."""

    now: Callable[[], float] = time.monotonic
    cpu: Callable[[], float] = time.process_time
    sleep: Callable[[float], Awaitable[None]] = asyncio.sleep


REAL_TIME = Clock()


async def run_closed_loop(
    target: Target,
    requests: Sequence[LoadRequest],
    *,
    concurrency: int,
    warmup: Sequence[LoadRequest] = (),
    clock: Clock = REAL_TIME,
    on_done: OnDone | None = None,
) -> list[Sample]:
    """`concurrency` clients that each send their next request, or session, when the last one has ended.

    warmup: sent before, as many at once, and not counted; prompts that `requests` do not have, lest they
        warm a prefix cache. on_done: called with each sample as it is whole.
    Returns one sample for each request, in their order; a request that failed has `error` set.

    Raises:
        InvalidArgument: no requests, or a concurrency below 1.
        FailedPrecondition: a session cannot go on, see `continue_conversation`.
        MeshError: a warm-up request failed.
    """
    _require_requests(requests)
    if concurrency < 1:
        raise InvalidArgument(
            f"concurrency is {concurrency}; at least 1 request at once is needed", field="concurrency"
        )
    await _warm_up(target, warmup, concurrency=concurrency, clock=clock)
    run = _Run(target, requests, clock, on_done)
    await run.send_in_turn(concurrency)
    return run.samples


async def run_open_loop(
    target: Target,
    requests: Sequence[LoadRequest],
    *,
    max_concurrency: int | None = None,
    warmup: Sequence[LoadRequest] = (),
    clock: Clock = REAL_TIME,
    on_done: OnDone | None = None,
) -> list[Sample]:
    """Each request at its `at_s` after the start, however the server keeps up; see `spread_arrivals`.

    A later turn of a session goes out at its time, or when the turn before has ended if that is later.
    max_concurrency: at most so many at once; what is due waits, and its sample's due_s shows how long.
    warmup, on_done, the result and errors: as `run_closed_loop`.
    """
    _require_requests(requests)
    if max_concurrency is not None and max_concurrency < 1:
        raise InvalidArgument(
            f"max_concurrency is {max_concurrency}; at least 1 is needed, or None for no limit",
            field="max_concurrency",
        )
    if any(request.at_s is None for request in requests):
        raise InvalidArgument(
            "at_s: an open loop needs the arrival of each request; draw them with spread_arrivals "
            "(--request-rate), or run a closed loop",
            field="at_s",
        )
    await _warm_up(target, warmup, concurrency=max_concurrency or len(warmup), clock=clock)
    room = asyncio.Semaphore(max_concurrency) if max_concurrency else contextlib.nullcontext()
    run = _Run(target, requests, clock, on_done, room=room, begun_s=clock.now())
    await run.send_on_time()
    return run.samples


class _Run:
    """The samples of one run as they come. begun_s: origin of `at_s` in an open loop."""

    def __init__(
        self,
        target: Target,
        requests: Sequence[LoadRequest],
        clock: Clock,
        on_done: OnDone | None = None,
        *,
        room: contextlib.AbstractAsyncContextManager[Any] | None = None,
        begun_s: float | None = None,
    ) -> None:
        self._target = target
        self._requests = requests
        self._clock = clock
        self._on_done = on_done
        self._room = room or contextlib.nullcontext()
        self._begun_s = begun_s
        self.samples = [
            Sample(
                request.max_tokens,
                known_prompt_tokens=len(request.token_ids) if request.token_ids is not None else None,
            )
            for request in requests
        ]

    def conversations(self) -> list[list[int]]:
        """Indices of requests: a session's together, each other alone; by first appearance."""
        grouped: dict[str | int, list[int]] = {}
        for index, request in enumerate(self._requests):
            grouped.setdefault(index if request.session is None else request.session, []).append(index)
        return list(grouped.values())

    async def send_in_turn(self, concurrency: int) -> None:
        """So many clients, each with the next conversation once its last one has ended."""
        waiting = iter(self.conversations())

        async def client() -> None:
            for conversation in waiting:
                await self.converse(conversation)

        await _run_together([client() for _ in range(min(concurrency, len(self._requests)))])

    async def send_on_time(self) -> None:
        """Each conversation at its own time."""
        await _run_together([self.converse(conversation) for conversation in self.conversations()])

    async def converse(self, conversation: Sequence[int]) -> None:
        """Runs a conversation's requests one after another; after a failure the rest is not sent."""
        sent: LoadRequest | None = None
        for position, index in enumerate(conversation):
            request = self._requests[index]
            if sent is not None:
                before = self.samples[conversation[position - 1]]
                request = continue_conversation(
                    sent, answer_ids=before.token_ids, answer_text=before.text, then=request
                )
            await self._wait_until(self._due_s(index))
            await self._run_one(request, self.samples[index], due_s=self._due_s(index))
            if self.samples[index].error is not None:
                self._give_up(conversation[position + 1 :])
                return
            sent = request

    async def _run_one(self, request: LoadRequest, sample: Sample, *, due_s: float | None) -> None:
        async with self._room:
            if request.token_ids is not None:
                sample.known_prompt_tokens = len(request.token_ids)
            await run_one(self._target, request, sample, self._clock)
        sample.due_s = due_s
        self._tell(sample)

    def _give_up(self, indices: Sequence[int]) -> None:
        for index in indices:
            sample = self.samples[index]
            sample.sent_s = sample.ended_s = self._clock.now()
            sample.sent_cpu_s = sample.ended_cpu_s = self._clock.cpu()
            sample.error, sample.error_message = NOT_SENT, "the turn before it failed, so it was not sent"
            self._tell(sample)

    def _tell(self, sample: Sample) -> None:
        if self._on_done is not None:
            self._on_done(sample)

    def _due_s(self, index: int) -> float | None:
        at_s = self._requests[index].at_s
        return None if self._begun_s is None or at_s is None else self._begun_s + at_s

    async def _wait_until(self, due_s: float | None) -> None:
        if due_s is not None and (pause_s := due_s - self._clock.now()) > 0:
            await self._clock.sleep(pause_s)


async def run_one(target: Target, request: LoadRequest, sample: Sample, clock: Clock = REAL_TIME) -> None:
    """Fills `sample` with one request's stream, each message stamped on receipt."""
    now = clock.now
    sample.sent_cpu_s = clock.cpu()
    sample.sent_s = now()
    try:
        async with contextlib.aclosing(target.stream(request)) as stream:
            async for received in stream:
                sample.take(received, now())
    except MeshError as error:
        sample.fail(error)
    sample.ended_s = now()
    sample.ended_cpu_s = clock.cpu()


async def _warm_up(
    target: Target, requests: Sequence[LoadRequest], *, concurrency: int, clock: Clock
) -> None:
    run = _Run(target, requests, clock)
    await run.send_in_turn(concurrency)
    for sample in run.samples:
        if sample.error is not None:
            raise MeshError(
                f"a warm-up request failed ({sample.error}): {sample.error_message}", reason="WARM_UP_FAILED"
            )


def _require_requests(requests: Sequence[LoadRequest]) -> None:
    if not requests:
        raise InvalidArgument("requests: there are none, so there is nothing to send", field="requests")


async def _run_together(coroutines: Sequence[Coroutine[Any, Any, None]]) -> None:
    """Runs all; when one raises or the caller is cancelled, all others are ended before this returns."""
    tasks = [asyncio.create_task(coroutine) for coroutine in coroutines]
    try:
        await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
