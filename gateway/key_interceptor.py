"""Each call at the public listener belongs to a tenant before its handler runs, or is refused."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar

import grpc
import grpc.aio

from gateway.api_keys import KeyRing
from gateway.public_errors import readable_error
from gateway.tenant import Tenant
from meshkit.errors import MeshError, Unauthenticated
from meshkit.rpc.handlers import Context, Handler, Proceed, WrappedHandlers
from meshkit.rpc.interceptors import Continuation

AUTHORIZATION = "authorization"
HEALTH_METHODS = "/grpc.health.v1.Health/"
"""Probes have no key, and learn only whether this gateway serves."""

_tenant: ContextVar[Tenant] = ContextVar("tenant")


def current_tenant() -> Tenant:
    """Whose call the running handler answers.

    Raises:
        LookupError: no call was identified here, so nothing may be done for it.
    """
    return _tenant.get()


class KeyInterceptor(grpc.aio.ServerInterceptor):
    """Identifies the tenant of a call by its key; errors leave in public words where internals are hidden.

    is_public: see `readable_error`.
    on_refused: told of each call whose key is not good.
    """

    def __init__(
        self, ring: KeyRing, *, is_public: bool, on_refused: Callable[[], None] = lambda: None
    ) -> None:
        self._ring = ring
        self._is_public = is_public
        self._on_refused = on_refused
        self._handlers = WrappedHandlers(lambda method: self._around)

    async def intercept_service(
        self, continuation: Continuation, handler_call_details: grpc.HandlerCallDetails
    ) -> Handler | None:
        handler = await continuation(handler_call_details)
        if handler is None or handler_call_details.method.startswith(HEALTH_METHODS):
            return handler
        return self._handlers.wrap(handler, handler_call_details.method)

    async def _around(self, context: Context, proceed: Proceed) -> object:
        tenant = self._identify(context)
        token = _tenant.set(tenant)
        try:
            return await proceed()
        except MeshError as error:
            public = readable_error(error, tenant, is_public=self._is_public)
            if public is error:
                raise
            raise public from error
        finally:
            _tenant.reset(token)

    def _identify(self, context: Context) -> Tenant:
        try:
            return self._ring.identify(_authorization(context))
        except Unauthenticated:
            self._on_refused()
            raise


def _authorization(context: Context) -> Sequence[str]:
    metadata = context.invocation_metadata() or ()
    return [value for name, value in metadata if name == AUTHORIZATION and isinstance(value, str)]
