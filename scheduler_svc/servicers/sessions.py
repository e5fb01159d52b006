"""SessionService: the streams of the gateways. Translation only; the engine decides."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

from chipmesh.scheduler.v1alpha1 import session_pb2
from chipmesh.scheduler.v1alpha1.session_pb2_grpc import SessionServiceServicer
from meshkit.errors import Aborted, InvalidArgument, Unavailable
from meshkit.rpc.handlers import Context
from meshkit.rpc.peers import current_peer
from meshkit.telemetry.logging import get_logger
from scheduler_svc.engine import Engine
from scheduler_svc.session import Session

log = get_logger(__name__)

REPORT_INTERVAL_S = 1.0
"""Of what a session's requests have: what was lost on the way shows after a few of them at the latest."""


class SessionServicer(SessionServiceServicer):
    """One session per gateway: a gateway that opens a new one ends its old one."""

    def __init__(
        self, engine: Engine, *, scheduler_id: str, report_interval_s: float = REPORT_INTERVAL_S
    ) -> None:
        self._engine = engine
        self._scheduler_id = scheduler_id
        self._report_interval_s = report_interval_s
        self._sessions: dict[str, Session] = {}
        self._none = asyncio.Event()
        self._none.set()
        self._closed = False

    @property
    def gateway_count(self) -> int:
        """Gateways with a session."""
        return len(self._sessions)

    async def close_all(self, *, timeout_s: float) -> None:
        """End every session, after its waiting events were sent; return when all have ended.

        No new one is taken. A gateway that does not read holds us for `timeout_s` seconds at most.
        """
        self._closed = True
        for session in self._sessions.values():
            session.close()
        try:
            await asyncio.wait_for(self._none.wait(), timeout_s)
        except asyncio.TimeoutError:
            log.warning("gateways do not read their last events", gateways=sorted(self._sessions))

    async def OpenSession(  # type: ignore[override]  # a coroutine that writes to the context
        self, request_iterator: AsyncIterator[session_pb2.OpenSessionRequest], context: Context
    ) -> None:
        """See session.proto.

        Raises:
            InvalidArgument: the first message has no hello, or no gateway id.
            Aborted: the same gateway opened a newer session.
            Unavailable: this scheduler stops.
            PermissionDenied: the id is not one of the gateway that the certificate names.
        """
        first = await anext(aiter(request_iterator), None)
        _check_speaker(first)
        session = self._open(first)
        try:
            welcome = session_pb2.SessionWelcome(scheduler_id=self._scheduler_id)
            await context.write(session_pb2.OpenSessionResponse(welcome=welcome))
            if first is not None:
                self._execute(session, first)
            await self._carry(session, request_iterator, context)
        finally:
            self._close(session)
        if session.end is not None:
            raise session.end

    def _open(self, first: session_pb2.OpenSessionRequest | None) -> Session:
        if first is None or not first.hello.gateway_id:
            raise InvalidArgument(
                "the first message of a session must carry hello with a gateway_id", field="hello.gateway_id"
            )
        if self._closed:
            raise Unavailable("this scheduler stops; the next one takes the session", reason="STOPPING")
        gateway_id = first.hello.gateway_id
        older = self._sessions.pop(gateway_id, None)
        if older is not None:
            log.warning("gateway opened a new session, its old one ends", gateway=gateway_id)
            older.close(Aborted(f"gateway {gateway_id!r} opened a newer session", reason="SESSION_REPLACED"))
            self._cancel_requests(older)
        session = self._sessions[gateway_id] = Session(gateway_id)
        self._none.clear()
        self._engine.changes.bump()
        log.info("session opened", gateway=gateway_id)
        return session

    def _close(self, session: Session) -> None:
        self._cancel_requests(session)
        if self._sessions.get(session.gateway_id) is session:
            del self._sessions[session.gateway_id]
        if not self._sessions:
            self._none.set()
        self._engine.changes.bump()
        log.info("session ended", gateway=session.gateway_id)

    def _cancel_requests(self, session: Session) -> None:
        for live in list(session.requests.values()):
            self._engine.cancel(live)

    async def _carry(
        self, session: Session, requests: AsyncIterator[session_pb2.OpenSessionRequest], context: Context
    ) -> None:
        """Commands in, events out, until either side ends or the session is closed."""
        reading = asyncio.create_task(self._read(session, requests), name=f"commands of {session.gateway_id}")
        writing = asyncio.create_task(_write(session, context), name=f"events to {session.gateway_id}")
        reporting = asyncio.create_task(
            _report(session, self._report_interval_s), name=f"reports to {session.gateway_id}"
        )
        try:
            done, _ = await asyncio.wait({reading, writing}, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in (reading, writing, reporting):
                task.cancel()
            await asyncio.gather(reading, writing, reporting, return_exceptions=True)

    async def _read(self, session: Session, requests: AsyncIterator[session_pb2.OpenSessionRequest]) -> None:
        async for message in requests:
            self._execute(session, message)

    def _execute(self, session: Session, message: session_pb2.OpenSessionRequest) -> None:
        for command in message.commands:
            kind = command.WhichOneof("command")
            number = command.request_number
            if kind == "submit":
                self._submit(session, number, command.submit)
            elif kind in ("cancel", "stop"):
                if (live := session.requests.get(number)) is not None:
                    self._engine.cancel(live)
            else:
                log.warning("command of no known kind ignored", gateway=session.gateway_id, number=number)

    def _submit(self, session: Session, number: int, message: session_pb2.SubmitRequest) -> None:
        if number in session.requests:
            log.error("request number used twice, ignored", gateway=session.gateway_id, number=number)
            return
        self._engine.submit(session, number, message)


def _check_speaker(first: session_pb2.OpenSessionRequest | None) -> None:
    """A gateway NAME has ids of the form NAME/...: by another's id it would end that one's session."""
    gateway_id = first.hello.gateway_id if first is not None else ""
    current_peer().require_name(gateway_id.partition("/")[0], field="hello.gateway_id")


async def _report(session: Session, interval_s: float) -> None:
    while True:
        await asyncio.sleep(interval_s)
        session.report()


async def _write(session: Session, context: Context) -> None:
    async for batch in session.batches():
        await context.write(batch)
