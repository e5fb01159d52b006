"""Listen addresses: "HOST:PORT" (port 0 picks a free one), "[IPV6]:PORT" or "unix:PATH"."""

from __future__ import annotations

import ipaddress
from dataclasses import dataclass

from meshkit.errors import InvalidArgument, MeshError

_FORMS = "'HOST:PORT' with a port of 0 to 65535 (0 picks a free one), or 'unix:PATH'"


@dataclass(frozen=True)
class TcpAddress:
    """A host (without brackets) and a port, 0 to 65535."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


@dataclass(frozen=True)
class UnixAddress:
    """A Unix socket at a file path."""

    path: str

    def __str__(self) -> str:
        return f"unix:{self.path}"


def parse_listen(text: str, *, field: str = "listen") -> TcpAddress | UnixAddress:
    """Read a listen address.

    Raises:
        InvalidArgument: `text` has none of the known forms; `field` is named.
    """
    if text.startswith("unix:") and len(text) > len("unix:"):
        return UnixAddress(text[len("unix:") :])
    host, _, port = text.rpartition(":")
    if not host or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise InvalidArgument(f"{field} is {text!r}; expected {_FORMS}", field=field)
    return TcpAddress(host.removeprefix("[").removesuffix("]"), int(port))


def is_local(text: str) -> bool:
    """Whether only processes of this host can reach the address; False for one of no known form."""
    try:
        address = parse_listen(text)
    except MeshError:
        return False  # The field's own check reports it.
    if isinstance(address, UnixAddress):
        return True
    return is_loopback(address.host)


def is_loopback(host: str) -> bool:
    """Whether a host's name or address means this host, whatever a resolver says."""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
