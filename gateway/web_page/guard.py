"""Who may read and steer the mesh by the page: this host's own user, or an operator's key; no other site.

Any page that a browser shows may send requests to loopback. So a call that changes something has to come from
our own page, and one without a key has to name this host: a name of somebody else's that resolves to loopback
(DNS rebinding) makes a stranger's page look like ours.
"""

from __future__ import annotations

import secrets
from collections.abc import Awaitable, Callable
from urllib.parse import urlsplit

from starlette.types import Receive, Scope, Send

from gateway.api_keys import KeyRing
from gateway.openai_http.call import Call, ClientGone
from gateway.openai_http.edge import refuse
from gateway.web_page.headers import SECURITY_HEADERS
from meshkit.address import is_loopback
from meshkit.errors import Internal, MeshError, PermissionDenied, Unauthenticated
from meshkit.telemetry.logging import get_logger

log = get_logger(__name__)

Handler = Callable[[Call], Awaitable[None]]
_OWN_SITES = ("same-origin", "none")
"""Values of Sec-Fetch-Site of our own page, and of an address that the user typed."""


class PageGuard:
    """Makes ASGI endpoints of handlers for operators.

    has_keys: whether keys are configured at all. is_public: the listener is reached from beyond this host.
    over_tcp: False for a Unix socket, which no browser reaches by name.
    on_refused: told of each call whose key is not good.
    """

    def __init__(
        self,
        ring: KeyRing,
        *,
        has_keys: bool,
        is_public: bool,
        over_tcp: bool,
        on_refused: Callable[[], None],
    ) -> None:
        self._ring = ring
        self._needs_key = has_keys or is_public
        self._checks_host = over_tcp and not self._needs_key
        self._on_refused = on_refused

    @property
    def needs_key(self) -> bool:
        """Whether an operator's key is asked for."""
        return self._needs_key

    def guard(self, handler: Handler) -> GuardedPageEndpoint:
        """`handler` for operators; its errors are answers in OpenAI's shape, in full."""
        return GuardedPageEndpoint(self, handler)

    async def serve(self, call: Call, handler: Handler, *, method: str) -> None:
        """Run `handler` if the call may; what goes wrong is its answer, or the last event of its stream."""
        try:
            self._check_site(call, changes=method == "POST")
            self._check_operator(call)
            await handler(call)
        except ClientGone:
            return
        except MeshError as error:
            await refuse(call, error, kind="error")
        except Exception:
            error_id = secrets.token_hex(4)
            log.exception("page handler failed", error_id=error_id)
            await refuse(call, Internal(f"internal error (id {error_id})"), kind="error")

    def _check_site(self, call: Call, *, changes: bool) -> None:
        host = call.headers_in.get("host", "")
        if self._checks_host and not _is_this_host(host):
            raise PermissionDenied(
                f"the page was asked for as host {host!r}; without an operator's key it answers to this "
                "host's own names only: use 127.0.0.1 or localhost",
                reason="HOST_NOT_LOCAL",
            )
        if not changes:
            return
        origin = call.headers_in.get("origin")
        site = call.headers_in.get("sec-fetch-site", "same-origin")
        if site not in _OWN_SITES or (origin is not None and urlsplit(origin).netloc != host):
            raise PermissionDenied(
                f"the call comes from {origin!r}, and this gateway was called as {host!r}: only its own page "
                "may change the mesh. Where a proxy stands between, let it pass the header Host on",
                reason="CROSS_ORIGIN",
            )

    def _check_operator(self, call: Call) -> None:
        try:
            call.tenant = self._ring.identify(call.headers_in.getlist("authorization"))
        except Unauthenticated:
            self._on_refused()
            raise
        if not self._needs_key or call.tenant.is_operator:
            return
        whose = f"key {call.tenant.name!r} is none" if call.tenant.name else "this call has none"
        raise PermissionDenied(
            f"the mesh is shown to operators, and steered by them: it needs an operator's key, and {whose}. "
            "`chipmesh keys new NAME --operator` makes one",
            reason="OPERATOR_REQUIRED",
        )


class GuardedPageEndpoint:
    """One route, as ASGI calls it. It makes no span: who looks at traces does not look for himself."""

    def __init__(self, guard: PageGuard, handler: Handler) -> None:
        self._guard = guard
        self._handler = handler

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        call = Call(scope, receive, send)
        call.headers.update({**SECURITY_HEADERS, "cache-control": "no-store"})
        await self._guard.serve(call, self._handler, method=scope["method"])


def _is_this_host(host: str) -> bool:
    """Whether a Host header says loopback, by a name that no resolver can point elsewhere."""
    try:
        return is_loopback(urlsplit(f"//{host}").hostname or "")
    except ValueError:
        return False
