"""Certificates and keys in PEM files that are replaced while services run, and credentials made of them."""

from __future__ import annotations

import ssl
import time
from dataclasses import dataclass
from pathlib import Path

import grpc

from meshkit.config import TlsConfig
from meshkit.errors import InvalidArgument
from meshkit.telemetry.logging import get_logger

log = get_logger(__name__)

# Certificate and key are replaced one after the other, microseconds apart: a reader that comes between them
# finds two that do not belong together.
_TRIES = 20
_PAUSE_S = 0.01

_WAY_OUT = "`chipmesh certs create` makes such files, `chipmesh certs show` says what is in them"

Stamp = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True)
class Pems:
    """What the files held at one moment. authority: None where nobody is to be checked."""

    certificate: bytes
    key: bytes
    authority: bytes | None


class PemFiles:
    """A certificate, its key and the authorities that are trusted, in files that may change.

    field: the configuration's, for errors.
    """

    def __init__(self, *, certificate: Path, key: Path, authority: Path | None, field: str = "tls") -> None:
        self._field = field
        self._files = {"certificate": certificate, "key": key}
        if authority is not None:
            self._files["authority"] = authority
        self._read: Stamp | None = None

    def __repr__(self) -> str:
        return f"<PemFiles {', '.join(map(str, self._files.values()))}>"

    def read(self) -> Pems:
        """Their content.

        Raises:
            InvalidArgument: a file is missing or holds something else, or key and certificate do not belong
                together; `field` is the file's.
        """
        for _ in range(_TRIES - 1):
            try:
                return self._read_once()
            except (_HalfChanged, ssl.SSLError):
                time.sleep(_PAUSE_S)
        try:
            return self._read_once()
        except (_HalfChanged, ssl.SSLError) as error:
            raise self._wrong("key", f"does not belong to the certificate, or is no PEM ({error})") from error

    def read_if_changed(self) -> Pems | None:
        """Their content where it is another one than was read last. What cannot be read is logged: what was
        read last goes on to be used, and the next call tries again.
        """
        try:
            return None if self._stamp() == self._read else self._read_once()
        except (InvalidArgument, _HalfChanged, ssl.SSLError) as error:
            log.warning("changed certificate cannot be read yet, the former one is used", error=str(error))
            return None

    def _read_once(self) -> Pems:
        before = self._stamp()
        content = {name: self._bytes(name) for name in self._files}
        self._check(content)
        if self._stamp() != before:
            raise _HalfChanged("the files changed while they were read")
        self._read = before
        return Pems(content["certificate"], content["key"], content.get("authority"))

    def _stamp(self) -> Stamp:
        """What differs after a file was replaced or written."""
        facts = []
        for name, path in self._files.items():
            try:
                found = path.stat()
            except OSError as error:
                raise self._wrong(name, f"cannot be read: {error.strerror}") from error
            facts.append((found.st_ino, found.st_mtime_ns, found.st_size))
        return tuple(facts)

    def _bytes(self, name: str) -> bytes:
        try:
            return self._files[name].read_bytes()
        except OSError as error:
            raise self._wrong(name, f"cannot be read: {error.strerror}") from error

    def _check(self, content: dict[str, bytes]) -> None:
        """Raises ssl.SSLError where key and certificate do not belong together, InvalidArgument where the
        authority's file holds no certificate.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        # A password would be asked for at the terminal.
        context.load_cert_chain(self._files["certificate"], self._files["key"], password="")
        if "authority" in content:
            try:
                context.load_verify_locations(cadata=content["authority"].decode("ascii"))
            except (ssl.SSLError, UnicodeDecodeError, ValueError) as error:
                raise self._wrong("authority", "holds no certificate in PEM form") from error

    def _wrong(self, name: str, problem: str) -> InvalidArgument:
        field = f"{self._field}.{name}"
        return InvalidArgument(f"{field}: {self._files[name]} {problem}; {_WAY_OUT}", field=field)


class _HalfChanged(Exception):
    """Somebody replaces the files at this moment."""


def service_files(tls: TlsConfig) -> PemFiles:
    """The files of a service's `tls`."""
    return PemFiles(certificate=tls.certificate, key=tls.key, authority=tls.authority)


def service_credentials(tls: TlsConfig | None) -> grpc.ServerCredentials | None:
    """Credentials of a listener between services: its peers must have certificates. None without `tls`.

    Raises:
        InvalidArgument: as `server_credentials`.
    """
    if tls is None:
        return None
    return server_credentials(certificate=tls.certificate, key=tls.key, authority=tls.authority)


def server_credentials(
    *, certificate: Path, key: Path, authority: Path | None = None, field: str = "tls"
) -> grpc.ServerCredentials:
    """Credentials of a listener. Its files are looked at again for each new connection; connections that are
    there stay.

    authority: whose certificates its peers must have; None: it asks them for none.

    Raises:
        InvalidArgument: the files cannot be used; `field` and the file's name say which one.
    """
    files = PemFiles(certificate=certificate, key=key, authority=authority, field=field)

    def changed() -> grpc.ServerCertificateConfiguration | None:
        pems = files.read_if_changed()
        return None if pems is None else _configuration(pems)

    return grpc.dynamic_ssl_server_credentials(
        _configuration(files.read()),
        changed,  # type: ignore[arg-type]  # grpc takes None for "as before"; its stubs do not know
        require_client_authentication=authority is not None,
    )


def _configuration(pems: Pems) -> grpc.ServerCertificateConfiguration:
    return grpc.ssl_server_certificate_configuration(
        [(pems.key, pems.certificate)], root_certificates=pems.authority
    )


def channel_credentials(pems: Pems) -> grpc.ChannelCredentials:
    """Credentials of one connection to another service."""
    return grpc.ssl_channel_credentials(
        root_certificates=pems.authority, private_key=pems.key, certificate_chain=pems.certificate
    )
