"""The one session with the scheduler: all requests' commands and events on one stream, opened again when it
breaks, with every live request submitted again from the tokens that it has.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

import grpc
import grpc.aio

from chipmesh.scheduler.v1alpha1 import session_pb2 as pb
from chipmesh.scheduler.v1alpha1 import session_pb2_grpc
from gateway.generation_spec import Finish, FinishReason
from gateway.live_request import LiveRequest
from gateway.lost_messages import SilenceWatch, is_position, is_report
from gateway.session_messages import (
    apply_event,
    cancel_command,
    in_batches,
    is_last,
    stop_command,
    submit_command,
)
from meshkit.errors import Internal, Unavailable
from meshkit.telemetry.logging import get_logger

if TYPE_CHECKING:  # generic in the stubs only
    Call = grpc.aio.StreamStreamCall[pb.OpenSessionRequest, pb.OpenSessionResponse]

log = get_logger(__name__)


@dataclass(frozen=True)
class SessionSettings:
    """Bounds of a session, in seconds and bytes.

    handshake_s: to connect and be welcomed. retry_first_s, retry_most_s: pause between attempts, doubled each
    time. outage_limit_s: requests fail when there was no session for so long. batch_bytes: commands that
    travel in one message, unless one alone is larger.
    """

    handshake_s: float = 5.0
    retry_first_s: float = 0.05
    retry_most_s: float = 1.0
    outage_limit_s: float = 60.0
    batch_bytes: int = 4 * 1024 * 1024


class SessionEndedError(Exception):
    """The scheduler closed the session, or broke its protocol."""


# Why a new scheduler may refuse a request today and take it in a moment: its workers have not all registered
# again, or all gateways bring their requests back at once.
_MAY_PASS = frozenset(
    int(code.value[0])
    for code in (
        grpc.StatusCode.NOT_FOUND,
        grpc.StatusCode.UNAVAILABLE,
        grpc.StatusCode.RESOURCE_EXHAUSTED,
    )
)

# What a broken session raises here; anything else is a fault of ours and must be seen.
_BROKEN = (grpc.aio.AioRpcError, grpc.aio.BaseError, asyncio.InvalidStateError, asyncio.TimeoutError,
           SessionEndedError)  # fmt: skip


class SessionClient:
    """Carries all requests of this gateway.

    on_change: called with True when a session is up, with False when it broke.
    clock: monotonic seconds.
    """

    def __init__(
        self,
        channel: grpc.aio.Channel,
        *,
        gateway_id: str,
        settings: SessionSettings,
        on_change: Callable[[bool], None] = lambda up: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._open_session = session_pb2_grpc.SessionServiceStub(channel).OpenSession
        self._gateway_id = gateway_id
        self._settings = settings
        self._on_change = on_change
        self._clock = clock
        self._requests: dict[int, LiveRequest] = {}
        self._number_of: dict[LiveRequest, int] = {}
        self._brought_back: set[int] = set()
        self._last_number = 0
        self._up_since = clock()
        self._outbox = Outbox()
        self._silence = SilenceWatch()
        self._gaps: WeakKeyDictionary[LiveRequest, int] = WeakKeyDictionary()
        """Where tokens of a request were missing last."""
        self._outage: asyncio.TimerHandle | None = None
        self._scheduler_id: str | None = None

    def __repr__(self) -> str:
        return f"<SessionClient {self._scheduler_id or 'down'} {len(self._requests)} requests>"

    @property
    def scheduler_id(self) -> str | None:
        """Id of the scheduler that the session is with; None while there is none."""
        return self._scheduler_id

    @property
    def is_up(self) -> bool:
        """Whether there is a session."""
        return self._scheduler_id is not None

    def submit(self, request: LiveRequest) -> None:
        """Carry a new request; while there is no session it waits for the next one."""
        number = self._enter(request)
        if self.is_up:
            self._outbox.put(submit_command(number, request, now=self._clock()))

    def cancel(self, request: LiveRequest) -> None:
        """Stop carrying a request and tell the scheduler that nobody wants it. Idempotent."""
        number = self._number_of.get(request)
        if number is not None:
            self._leave(number)
            if self.is_up:
                self._outbox.put(cancel_command(number))

    async def flush(self) -> None:
        """Return when all commands given so far are on their way, or there is no session."""
        if self.is_up:
            await self._outbox.wait_empty()

    async def run(self) -> None:
        """Keep a session open until cancelled."""
        pause_s = self._settings.retry_first_s
        try:
            while True:
                was_up, cause = await self._run_one_session()
                log.warning("no session with the scheduler", cause=cause, was_up=was_up)
                longer_s = min(2 * pause_s, self._settings.retry_most_s)
                pause_s = self._settings.retry_first_s if was_up else longer_s
                # Spread, so that the gateways of a mesh do not all come back at the same instant.
                await asyncio.sleep(pause_s * random.uniform(0.5, 1.0))
        finally:
            self._end_outage()

    async def _run_one_session(self) -> tuple[bool, str]:
        """Try to open a session and keep it to its end: whether it was up, and why it ended."""
        conversation = asyncio.create_task(self._converse(), name="session")
        try:
            # Not awaited directly: a call that the scheduler cancelled ends in CancelledError, too, and that
            # is no wish to end this task.
            await asyncio.wait({conversation})
        finally:
            conversation.cancel()
            await asyncio.gather(conversation, return_exceptions=True)
            was_up = self._go_down()
        return was_up, _cause(conversation)

    async def _converse(self) -> None:
        call = self._open_session(wait_for_ready=True)
        try:
            welcome = await asyncio.wait_for(self._shake_hands(call), self._settings.handshake_s)
            self._go_up(welcome)
            await self._carry(call)
        finally:
            call.cancel()

    async def _carry(self, call: Call) -> None:
        """Commands out, events in, until either fails, as it does whenever the scheduler goes."""
        tasks = {
            asyncio.create_task(self._read_events(call), name="session events"),
            asyncio.create_task(self._write_commands(call), name="session commands"),
        }
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
        for task in done:
            task.result()

    async def _shake_hands(self, call: Call) -> pb.OpenSessionResponse:
        await call.write(pb.OpenSessionRequest(hello=pb.SessionHello(gateway_id=self._gateway_id)))
        first = await call.read()
        if not isinstance(first, pb.OpenSessionResponse) or not first.HasField("welcome"):
            raise SessionEndedError("the scheduler's first message carries no welcome")
        return first

    def _go_up(self, first: pb.OpenSessionResponse) -> None:
        self._scheduler_id = first.welcome.scheduler_id
        self._up_since = self._clock()
        self._end_outage()
        self._outbox = Outbox()
        self._silence = SilenceWatch()
        waiting = list(self._requests.values())
        self._requests.clear()
        self._number_of.clear()
        self._brought_back.clear()
        for request in waiting:
            if not request.finish_if_complete():
                self.submit(request)
                if request.is_queued:
                    self._brought_back.add(self._last_number)
        log.info("session is up", scheduler=self._scheduler_id, resubmitted=len(self._requests))
        self._on_change(True)
        self._dispatch(first)

    def _go_down(self) -> bool:
        """Note that there is no session; whether there was one."""
        was_up = self.is_up
        if was_up:
            self._scheduler_id = None
            loop = asyncio.get_running_loop()
            self._outage = loop.call_later(self._settings.outage_limit_s, self._fail_after_long_outage)
            self._outbox.clear()
            self._on_change(False)
        return was_up

    def _end_outage(self) -> None:
        if self._outage is not None:
            self._outage.cancel()
            self._outage = None

    def _fail_after_long_outage(self) -> None:
        for number, request in list(self._requests.items()):
            self._leave(number)
            request.fail(
                Unavailable(
                    f"there has been no scheduler for {self._settings.outage_limit_s:g} s; try again later",
                    reason="SCHEDULER_LOST",
                    retry_after_s=self._settings.retry_most_s,
                )
            )

    async def _write_commands(self, call: Call) -> None:
        while True:
            for batch in in_batches(await self._outbox.take(), limit_bytes=self._settings.batch_bytes):
                await call.write(pb.OpenSessionRequest(commands=batch))
            self._outbox.sent()

    async def _read_events(self, call: Call) -> None:
        while True:
            response = await call.read()
            if not isinstance(response, pb.OpenSessionResponse):  # grpc's EOF
                raise SessionEndedError("the scheduler closed the session")
            self._dispatch(response)

    def _dispatch(self, response: pb.OpenSessionResponse) -> None:
        """Apply a message of the scheduler.

        Raises:
            SessionEndedError: a message before it was lost. All requests go on by another session.
        """
        for event in response.events:
            number = event.request_number
            request = self._requests.get(number)
            if request is not None:
                self._take(number, request, event)
            elif is_position(event):
                # Others were sent before the scheduler knew that it ended here; this one is still worked on.
                self._outbox.put(cancel_command(number))
        if is_report(response):
            missing = self._silence.find_missing(response, self._requests)
            if missing is not None:
                raise SessionEndedError(f"a message was lost: the scheduler does not have request {missing}")

    def _take(self, number: int, request: LiveRequest, event: pb.RequestEvent) -> None:
        if number in self._brought_back:
            if self._may_pass(event):
                self._bring_again(number, request)
                return
            self._brought_back.discard(number)  # The scheduler has taken it for good.
        if event.HasField("tokens"):
            self._check_gap(request, event.tokens.first_index)
        try:
            apply_event(request, event)
        except Exception:
            # A fault in one request's event may not take the session, and with it all others, down.
            log.exception("event could not be applied", request=repr(request))
            request.fail(Internal("an event of this request could not be applied"))
        if request.has_ended:
            self._settle(number, request, event)

    def _check_gap(self, request: LiveRequest, first_index: int) -> None:
        """Where tokens are missing, another session brings them. Where they are missing there, too, it is the
        scheduler that has lost them, and the request fails.
        """
        known = len(request.token_ids)
        if first_index <= known or self._gaps.get(request) == known:
            return
        self._gaps[request] = known
        raise SessionEndedError(f"a message was lost: token {first_index} came where {known} is the next one")

    def _settle(self, number: int, request: LiveRequest, event: pb.RequestEvent) -> None:
        """A request has ended by an event: the scheduler is done with it, or has to be told that we are."""
        if is_last(event):
            self._leave(number)
        else:
            self._end_early(number, request)

    def _may_pass(self, event: pb.RequestEvent) -> bool:
        """Whether a scheduler refused an accepted request that was brought back, but may take it yet."""
        return (
            event.WhichOneof("event") == "failed"
            and event.failed.code in _MAY_PASS
            and self._clock() - self._up_since < self._settings.outage_limit_s
        )

    def _bring_again(self, refused: int, request: LiveRequest) -> None:
        """Submit once more, after a pause; a session that opens meanwhile does it instead."""
        self._leave(refused)
        number = self._enter(request)
        self._brought_back.add(number)
        loop = asyncio.get_running_loop()
        loop.call_later(self._settings.retry_most_s, self._submit_again, number)

    def _submit_again(self, number: int) -> None:
        request = self._requests.get(number)
        if request is not None and self.is_up:
            self._outbox.put(submit_command(number, request, now=self._clock()))

    def _end_early(self, number: int, request: LiveRequest) -> None:
        """The gateway ended a request that the scheduler still works on: say so."""
        self._leave(number)
        stopped = isinstance(request.end, Finish) and request.end.reason is FinishReason.STOP
        self._outbox.put(stop_command(number) if stopped else cancel_command(number))

    def _enter(self, request: LiveRequest) -> int:
        self._last_number += 1
        self._requests[self._last_number] = request
        self._number_of[request] = self._last_number
        return self._last_number

    def _leave(self, number: int) -> None:
        del self._number_of[self._requests.pop(number)]
        self._brought_back.discard(number)


class Outbox:
    """Commands that wait to be sent: all that were put in one turn of the loop leave in one message."""

    def __init__(self) -> None:
        self._commands: list[pb.RequestCommand] = []
        self._filled = asyncio.Event()
        self._empty = asyncio.Event()
        self._empty.set()

    def put(self, command: pb.RequestCommand) -> None:
        """Add one; never blocks, since each live request has at most two commands here."""
        self._commands.append(command)
        self._filled.set()
        self._empty.clear()

    async def take(self) -> list[pb.RequestCommand]:
        """All commands, waiting for the first."""
        await self._filled.wait()
        self._filled.clear()
        commands, self._commands = self._commands, []
        return commands

    def sent(self) -> None:
        """What was taken has been written."""
        if not self._commands:
            self._empty.set()

    def clear(self) -> None:
        """Drop everything: the session that it was for is over."""
        self._commands.clear()
        self._filled.clear()
        self._empty.set()

    async def wait_empty(self) -> None:
        """Return when all that was put has been sent or dropped."""
        await self._empty.wait()


def _cause(conversation: asyncio.Task[None]) -> str:
    """Why a session ended, in words.

    Raises:
        Exception: whatever ended it that is no broken session.
    """
    if conversation.cancelled():
        return "the scheduler cancelled the call"
    error = conversation.exception()
    if isinstance(error, grpc.aio.AioRpcError):
        return f"{error.code().name}: {error.details()}"
    if isinstance(error, asyncio.TimeoutError):
        return "no scheduler answers"
    if isinstance(error, _BROKEN):
        return str(error)
    if error is not None:
        raise error
    return "ended"
