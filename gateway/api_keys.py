"""Who a call is from: the configured keys, by their SHA-256, and the tenant of each."""

from __future__ import annotations

import hashlib
import hmac
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gateway.config import ApiKeyConfig
from gateway.tenant import Tenant
from meshkit.errors import Unauthenticated

_SCHEME = "bearer "


@dataclass(frozen=True)
class ApiKey:
    """A configured key. digests: SHA-256 of each text that is good for it now."""

    config: ApiKeyConfig
    digests: tuple[bytes, ...] = field(repr=False)


def digest_of(key: str) -> bytes:
    """What is kept of a key: 32 bytes."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()


class KeyRing:
    """All keys that are good now, and their tenants, which outlive a change of keys or limits.

    checks_keys: False where none are configured at all, and every call is the anonymous tenant's.
    allow_anonymous: calls without a key are its, too.
    """

    def __init__(
        self,
        *,
        checks_keys: bool,
        allow_anonymous: bool = False,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.anonymous = Tenant(clock=clock)
        self._checks_keys = checks_keys
        self._allow_anonymous = allow_anonymous or not checks_keys
        self._clock = clock
        self._tenants: dict[str, Tenant] = {}
        self._known: list[tuple[bytes, Tenant]] = []

    def __repr__(self) -> str:
        return f"<KeyRing {', '.join(self._tenants) or 'empty'}>"

    @property
    def tenants(self) -> list[Tenant]:
        """Those of all keys that there are or were."""
        return list(self._tenants.values())

    @property
    def served(self) -> list[Tenant]:
        """All whose calls are or were served: without a key only where that is allowed."""
        return [*([self.anonymous] if self._allow_anonymous else []), *self.tenants]

    def replace(self, keys: Sequence[ApiKey]) -> None:
        """These are the keys from now on. A tenant that stays keeps what it spent; streams that run go on."""
        self._known = [(digest, self._tenant(key.config)) for key in keys for digest in key.digests]

    def identify(self, authorization: Sequence[str]) -> Tenant:
        """Whose call has these values of `authorization`.

        Raises:
            Unauthenticated: nobody's.
        """
        if not self._checks_keys or (self._allow_anonymous and not authorization):
            return self.anonymous
        given = authorization[0] if len(authorization) == 1 else ""
        is_bearer = given[: len(_SCHEME)].lower() == _SCHEME
        tenant = self._find(given[len(_SCHEME) :].strip() if is_bearer else "")
        if tenant is None:
            # The same words for each way to be wrong: they are no oracle.
            raise Unauthenticated(
                "this call needs a valid API key; send it as metadata `authorization: Bearer KEY` "
                "(`chipmesh` takes it from CHIPMESH_API_KEY)",
                reason="API_KEY_INVALID",
            )
        return tenant

    def _find(self, key: str) -> Tenant | None:
        """Every key is looked at, and each comparison takes the same time: how long it took tells nothing."""
        digest = digest_of(key)
        found = None
        for known, tenant in self._known:
            if hmac.compare_digest(known, digest):
                found = tenant
        return found

    def _tenant(self, config: ApiKeyConfig) -> Tenant:
        tenant = self._tenants.get(config.name)
        if tenant is None:
            tenant = self._tenants[config.name] = Tenant(config, clock=self._clock)
        else:
            tenant.configure(config)
        return tenant
