"""TLS of an HTTP listener whose certificate may be replaced while it serves."""

from __future__ import annotations

import ssl
from pathlib import Path

from meshkit.errors import InvalidArgument
from meshkit.rpc.tls import PemFiles
from meshkit.telemetry.logging import get_logger

log = get_logger(__name__)


def listener_context(*, certificate: Path, key: Path, field: str) -> ssl.SSLContext:
    """A server's context. Its files are looked at again at each new connection; connections that are there
    stay. Reads files: call it in a thread.

    Raises:
        InvalidArgument: the files cannot be used; `field` and the file's name say which one.
    """
    files = PemFiles(certificate=certificate, key=key, authority=None, field=field)
    files.read()
    current = _load(certificate, key)

    def on_hello(connection: ssl.SSLObject, _name: str | None, _context: ssl.SSLContext) -> None:
        # Called at each hello, also at one that names no server.
        nonlocal current
        if files.read_if_changed() is not None:
            try:
                current = _load(certificate, key)
            except (OSError, InvalidArgument) as error:
                log.warning(
                    "changed certificate cannot be read yet, the former one is used", error=str(error)
                )
        connection.context = current

    outer = _load(certificate, key)
    outer.sni_callback = on_hello
    return outer


def _load(certificate: Path, key: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.set_alpn_protocols(["http/1.1"])
    # A password would be asked for at the terminal.
    context.load_cert_chain(certificate, key, password="")
    return context
