"""One gateway's requests, and the events on their way to it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator

from chipmesh.scheduler.v1alpha1 import session_pb2
from meshkit.errors import MeshError, ResourceExhausted
from scheduler_svc.core.structures import FinishReason
from scheduler_svc.live_request import LiveRequest, ReplicaInfo

_REASONS = {
    FinishReason.STOP: session_pb2.RequestFinished.REASON_STOP,
    FinishReason.LENGTH: session_pb2.RequestFinished.REASON_LENGTH,
    FinishReason.CANCELLED: session_pb2.RequestFinished.REASON_CANCELLED,
}


class Session:
    """One gateway's requests, and the events that wait to be sent to it. An EventSink.

    Whatever happens within one turn of the event loop leaves as one message.
    """

    def __init__(self, gateway_id: str) -> None:
        self.gateway_id = gateway_id
        self.requests: dict[int, LiveRequest] = {}
        self.end: MeshError | None = None
        self._outbox = session_pb2.OpenSessionResponse()
        self._grown: dict[int, tuple[LiveRequest, int]] = {}
        """Requests with tokens that wait to be sent, and the index of the first one. Where they lie is the
        request's own output: so a token costs nothing here but the first of a message.
        """
        self._report_is_due = False
        self._wakeup = asyncio.Event()
        self._closing = False

    def __repr__(self) -> str:
        return f"<Session {self.gateway_id} requests={len(self.requests)}>"

    def close(self, error: MeshError | None = None) -> None:
        """End the stream once the waiting events are sent: well, or with `error`."""
        self._closing = True
        self.end = self.end or error
        self._wakeup.set()

    async def batches(self) -> AsyncIterator[session_pb2.OpenSessionResponse]:
        """Events as they come, all that wait in one message, until the session is closed."""
        while True:
            await self._wakeup.wait()
            self._wakeup.clear()
            if self._outbox.events or self._grown or self._report_is_due:
                for live, start in self._grown.values():
                    self._add_tokens(live, start)
                self._grown.clear()
                self._add_report()
                batch, self._outbox = self._outbox, session_pb2.OpenSessionResponse()
                yield batch
            elif self._closing:
                return
            if self._closing:
                self._wakeup.set()

    def report(self) -> None:
        """Say of all requests how many tokens they have, in the next message: by that a gateway sees that a
        message before it was lost. Where there are none that message may be empty.
        """
        self._report_is_due = True
        self._wakeup.set()

    def _add_report(self) -> None:
        if self._report_is_due:
            self._report_is_due = False
            for number, live in self.requests.items():
                position = self._add(number).tokens
                position.SetInParent()
                position.first_index = len(live.core.output)

    def _add(self, number: int) -> session_pb2.RequestEvent:
        """An event, after the tokens that came before it."""
        if (grown := self._grown.pop(number, None)) is not None:
            self._add_tokens(*grown)
        event = self._outbox.events.add()
        event.request_number = number
        self._wakeup.set()
        return event

    def _add_tokens(self, live: LiveRequest, start: int) -> None:
        event = self._outbox.events.add()
        event.request_number = live.number
        tokens = event.tokens
        tokens.first_index = start
        tokens.token_ids.extend(live.core.output[start:])
        if live.logprobs:
            tokens.logprobs.extend(live.logprobs[start - len(live.core.output) :])

    def queued(self, live: LiveRequest) -> None:
        """The scheduler has the request."""
        self.requests[live.number] = live
        self._add(live.number).queued.SetInParent()

    def placed(self, number: int, info: ReplicaInfo, *, cached_tokens: int) -> None:
        """It runs on a replica, the first time or again."""
        placed = self._add(number).placed
        placed.SetInParent()
        placed.group = info.group
        placed.worker = info.worker
        placed.chip = info.chip
        placed.numeric_class = info.numeric_class
        placed.cached_tokens = cached_tokens

    def grew(self, live: LiveRequest) -> None:
        """It has one token more."""
        if live.number not in self._grown:
            self._grown[live.number] = live, len(live.core.output) - 1
            self._wakeup.set()

    def finished(self, number: int, reason: FinishReason) -> None:
        """It ended well. Last event of a request."""
        self.requests.pop(number, None)
        self._add(number).finished.reason = _REASONS[reason]

    def failed(self, number: int, error: MeshError) -> None:
        """It was refused or failed. Last event of a request."""
        self.requests.pop(number, None)
        failed = self._add(number).failed
        failed.code = error.code.value[0]
        failed.reason = error.reason
        failed.message = error.message
        failed.field = error.field or ""
        if isinstance(error, ResourceExhausted) and error.retry_after_s is not None:
            failed.retry_after_ms = math.ceil(error.retry_after_s * 1000)
