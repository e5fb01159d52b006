"""Who a call comes from, by its certificate; and the interceptor that asks the policy, once per call."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping
from contextvars import ContextVar

import grpc
import grpc.aio

from meshkit.errors import PermissionDenied
from meshkit.rpc.handlers import Around, Context, Handler, Proceed, WrappedHandlers, wrap_handler
from meshkit.rpc.policy import CERTIFIED, LOCAL, Access, Peer, Role
from meshkit.telemetry.logging import get_logger

log = get_logger(__name__)

_CURRENT: ContextVar[Peer] = ContextVar("peer", default=LOCAL)

SCHEME = "chipmesh://"
DOMAIN = "chipmesh.internal"

Continuation = Callable[[grpc.HandlerCallDetails], Awaitable["Handler | None"]]


def peer_uri(role: Role, name: str) -> str:
    """What a certificate of that peer has as URI."""
    return f"{SCHEME}{role.value}/{name}"


def server_name(role: Role, name: str | None = None) -> str:
    """The DNS name that stands in certificates of a role, or in that of one peer. Nobody resolves it."""
    return f"{name}.{role.value}.{DOMAIN}" if name else f"{role.value}.{DOMAIN}"


def read_uri(uri: str) -> Peer | None:
    """The peer that a certificate's URI names; None where it is none of ours."""
    role, slash, name = uri.removeprefix(SCHEME).partition("/")
    known = {each.value: each for each in CERTIFIED}
    if not uri.startswith(SCHEME) or role not in known or not slash or not name:
        return None
    return Peer(known[role], name)


def current_peer() -> Peer:
    """The other end of the call that is being handled; local where the listener asks for no certificate."""
    return _CURRENT.get()


def _peer_of(context: Context) -> Peer:
    """Whom the certificate of a call names. Only while its handler runs: later grpc would read freed memory.

    Raises:
        PermissionDenied: it does not name exactly one peer.
    """
    facts: Mapping[str, Iterable[bytes]] = context.auth_context()
    peers = [peer for uri in facts.get("peer_uri", ()) if (peer := read_uri(uri.decode(errors="replace")))]
    if len(peers) != 1:
        raise PermissionDenied(
            f"the certificate names {len(peers)} peers; it must have one URI of the form "
            f"{SCHEME}ROLE/NAME (`chipmesh certs create` makes such ones)",
            reason="NO_ROLE",
        )
    return peers[0]


class PolicyInterceptor(grpc.aio.ServerInterceptor):
    """Refuses calls that the access does not allow.

    by_certificate: peers are who their certificates say. Without, the answer is the same for all of them, and
    a call that is allowed is not touched.
    """

    def __init__(self, access: Access, *, by_certificate: bool) -> None:
        self._access = access
        self._by_certificate = by_certificate
        self._handlers = WrappedHandlers(self._check)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        method = handler_call_details.method
        access = self._access
        if self._by_certificate and access.everyone is None:
            return self._handlers.wrap(handler, method)
        try:
            access.check(LOCAL if access.everyone is None else Peer(access.everyone), method)
        except PermissionDenied as error:
            return _refuse(handler, error)
        return handler

    def _check(self, method: str) -> Around:
        async def around(context: Context, proceed: Proceed) -> object:
            try:
                peer = _peer_of(context)
                self._access.check(peer, method)
            except PermissionDenied as error:
                log.warning("call refused", method=method, peer=context.peer(), error=error.message)
                raise
            token = _CURRENT.set(peer)
            try:
                return await proceed()
            finally:
                _CURRENT.reset(token)

        return around


def _refuse(handler: Handler, error: PermissionDenied) -> Handler:
    async def around(context: Context, proceed: Proceed) -> object:
        raise error

    return wrap_handler(handler, around)
